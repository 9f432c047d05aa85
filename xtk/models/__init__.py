"""Causal language models of transformers: loading, checks, training setup, and the split into backbone and head."""
