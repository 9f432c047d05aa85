"""One file a command. It parses, calls and prints; heavy imports wait in its body."""
