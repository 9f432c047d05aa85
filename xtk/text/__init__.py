"""Text: tokenizers as bytes, vocabularies, documents, and the alignment of two tokenizations."""
