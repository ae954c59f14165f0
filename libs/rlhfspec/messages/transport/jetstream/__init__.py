"""Parts of the NATS transport: the connection, and streams, deliveries and readings of JetStream."""
