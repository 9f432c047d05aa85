"""Another tokenizer for a model: its body is kept, embedding and output head get rows for the new tokens."""
