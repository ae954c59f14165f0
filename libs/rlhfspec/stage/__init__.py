"""What the code of every stage sees: the bus it speaks on, the thread it computes in, and its vital signs."""
