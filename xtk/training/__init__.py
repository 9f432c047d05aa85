"""Training: configuration and start of `distill`, the training loop (training_loop.py), on-policy and held-out runs."""
