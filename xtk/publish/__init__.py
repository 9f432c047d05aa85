"""A finished student for the world: model folders and the Hugging Face hub."""
