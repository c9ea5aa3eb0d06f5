"""Commands around a training, which a run never imports."""
