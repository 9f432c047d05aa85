"""The quickstart, a demonstration that runs the commands of a user."""
