"""What the command's exit code says; 2, of a wrong argument or job, is click's own."""

FAILED = 1
STOPPED = 130  # as a shell says of Ctrl-C
