"""Evaluation: bits per byte, tasks, generated answers and agreement with a teacher, comparable across tokenizers."""
