"""What the stages of a run say to each other, and how it travels: records, the map of the loop, transports, servers."""
