"""What servers and roles prove themselves with: certificates, keys, tokens."""
