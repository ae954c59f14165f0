"""What jobs of a release share: credentials, streams and users of the servers, what each namespace needs."""
