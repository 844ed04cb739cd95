"""Training on whole episodes: packing, the trainer and its settings."""
