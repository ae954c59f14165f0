"""What a Hugging Face model is made of: its trunk and head, its attentions, the past it believes in."""
