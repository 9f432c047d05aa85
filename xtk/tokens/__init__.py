"""Floor 1: text, tokens and bytes of one tokenizer, and the alignment of two."""
