"""What a worker's process is: its start, connections, health, weights, and how it ends."""
