"""Floor 6: the main demonstration, which runs the commands as a user types them."""
