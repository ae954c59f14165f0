"""Messages between the stages of a run: records, the map of the loop, transports and servers."""
