"""The run folder: what it holds, how it is written, continued and read."""
