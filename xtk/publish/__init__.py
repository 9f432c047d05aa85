"""A finished student for the world: model folders, GGUF and the Hugging Face hub."""
