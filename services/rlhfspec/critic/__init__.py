"""What the critic expects of a response, token by token."""
