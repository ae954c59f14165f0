"""Opens a run on the bus, looks on, and reports to the operator; in a cluster only."""
