"""What `nats.py` is made of: the connection, and streams, deliveries and readings of JetStream."""
