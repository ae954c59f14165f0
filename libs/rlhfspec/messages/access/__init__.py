"""The rights of each role to publish, consume and read, and connections that use them."""
