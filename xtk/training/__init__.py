"""Floor 5: the loop, read from top to bottom in loop.py."""
