"""Structure of a Hugging Face model: trunk and head, attentions, simulated past."""
