"""Every key of the section augment, switched on, for the laws, the GPU suite and the report on input."""

ALL_AUGMENTATIONS = {
    "color_jitter": 0.4,
    "randaugment_ops": 2,
    "randaugment_magnitude": 9,
    "trivial_augment": "true",
    "cutout_size": 8,
    "erasing_probability": 0.5,
    "mixup_alpha": 0.2,
    "cutmix_alpha": 1.0,
}
