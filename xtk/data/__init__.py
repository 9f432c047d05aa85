"""Data: files and records become documents."""
