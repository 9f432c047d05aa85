"""Tokenizers, documents and chat templates, and the alignment of a student's and a teacher's tokens."""
