"""The prompts of each step, in an order that is a function of seed and step."""
