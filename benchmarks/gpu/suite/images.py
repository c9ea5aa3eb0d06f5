"""Images for cases without the user's own."""

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

from bigbatch.trainer.datasets.generated import write_dataset


def small_images(scratch: Path, *, side: int = 40) -> Path:
    """Write some images of the embedded data set at that size."""
    root = scratch / f"shapes-{side}"
    write_dataset(root, train_per_class=2, val_per_class=2, side_pixels=(side, side))
    return root


def like_imagenet(scratch: Path, *, num_images: int) -> Path:
    """Write 1,000 classes of JPEGs of ImageNet's usual size, for training and validation alike."""
    root = scratch / "imagenet"
    if not root.exists():
        _build_class_folders(root, num_images=num_images)
        (root / "val").symlink_to("train")
    return root


def _build_class_folders(root: Path, *, num_images: int, num_classes: int = 1000) -> None:
    """Fill root/train/<wnid>/<wnid>_<number>.JPEG, names as long as ImageNet's, with one file and its hard links."""
    noise_HWC = np.random.default_rng(0).integers(0, 256, (93, 125, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise_HWC).resize((500, 375), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=85)
    per_class, rest = divmod(num_images, num_classes)
    for label in range(num_classes):
        wnid = f"n{label:08d}"
        folder = root / "train" / wnid
        folder.mkdir(parents=True)
        names = [f"{wnid}_{number * 7919 % 100_000}.JPEG" for number in range(per_class + (label < rest))]
        (folder / names[0]).write_bytes(buffer.getvalue())
        for name in names[1:]:
            os.link(folder / names[0], folder / name)
