"""PolicyDoor: an HTTP server through which OpenAI clients talk to a policy, with exact tokens in and out."""
