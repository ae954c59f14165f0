"""Resources that a release's jobs share: credentials, streams, Redis users, and namespace objects."""
