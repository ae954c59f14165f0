"""What each role may publish, consume and read, and how a process connects as that role."""
