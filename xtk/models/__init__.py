"""Floor 2: any causal language model of transformers, cut into body and head."""
