"""Large-batch optimizers, parameter groups and learning-rate schedules."""
