"""What every stage's process is made of: the bus it speaks on, the thread it computes in, who watches over it."""
