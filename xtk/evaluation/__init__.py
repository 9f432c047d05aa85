"""Floor 5: how good a model is, in numbers that do not depend on its tokenizer."""
