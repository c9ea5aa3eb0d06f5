"""A training run: models, input, precision, optimizers, the loop, checkpoints."""
