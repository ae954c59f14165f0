"""`rlhfspec bench serve`: chats alone, beside rollouts, and against vLLM's server."""
