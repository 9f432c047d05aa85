"""Runs on disk: folder, recipe, checkpoints, resuming, metrics and model card."""
