"""Credentials of servers and roles: certificates, keys and tokens."""
