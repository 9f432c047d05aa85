"""Floor 3: any causal language model of transformers, cut into body and head."""
