"""Keys of the section optimizer, as on a command line, that turn quickstart's LARS into others."""

OF_LARS = {"trust_coefficient": "null", "momentum_form": "null"}
ADAPTIVE = {**OF_LARS, "momentum": "null", "nesterov": "null", "betas": "[0.9,0.999]", "eps": "1e-6"}
FP16 = {"precision": "fp16", "loss_scale": "16384", "loss_scale_growth_steps": "2"}
"""The loss scale grows every second step until a step overflows."""
