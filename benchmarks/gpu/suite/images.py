"""Pictures for cases that the user gave none."""

from pathlib import Path

from benchmarks.input import startup
from bigbatch.trainer.datasets.generated import write_dataset


def small_images(scratch: Path, *, side: int = 40) -> Path:
    """Write the embedded data set, a few pictures of it, of that height and width."""
    root = scratch / f"shapes-{side}"
    write_dataset(root, train_per_class=2, val_per_class=2, side_pixels=(side, side))
    return root


def like_imagenet(scratch: Path, *, num_images: int) -> Path:
    """Write 1,000 classes of JPEGs of ImageNet's usual size, for training and validation alike."""
    root = scratch / "imagenet"
    if not root.exists():
        startup.build_class_folders(root, num_images=num_images)
        (root / "val").symlink_to("train")
    return root
