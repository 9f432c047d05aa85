"""Floor 6: the quickstart, a demonstration that runs the commands of a user."""
