"""Keys of the section optimizer, as on a command line, that turn quickstart's LARS into others."""

FP16 = {"precision": "fp16", "loss_scale": "16384", "loss_scale_growth_steps": "2"}
"""The loss scale grows every second step until a step overflows."""
