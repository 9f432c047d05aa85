"""Training: inputs of `distill`, the training loop (training_loop.py), on-policy rollouts, checkpoints and export."""
