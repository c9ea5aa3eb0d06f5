"""Data sets of other packages: data.root names a class by its import path."""

from collections.abc import Sequence

import numpy as np

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.dotted import class_of_root, make_own
from bigbatch.trainer.input.base import ImageSource
from bigbatch.trainer.input.order import require_same_classes

METHODS = ("__len__", "name", "read", "sizes", "close")
"""What a class must define to be an ImageSource, beside its attributes classes and labels_N."""


class ClassRoot:
    """Root that is a class of another package, called with the split and the text after its name."""

    def __init__(self, root: str) -> None:
        """Import nothing yet. root: class:IMPORT.PATH or class:IMPORT.PATH:TEXT."""
        self._root = root
        self._splits: dict[str, ImageSource] = {}

    def open(self, split: str, *, classes: Sequence[str] | None = None) -> ImageSource:
        """Do the same as Root's method. Raises: ConfigError in one line if the class is no ImageSource."""
        images = self._images(split)
        if classes is not None:
            require_same_classes(self._root, found=images.classes, expected=classes)
        return images

    def classes(self, split: str) -> tuple[str, ...]:
        return self._images(split).classes

    def _images(self, split: str) -> ImageSource:
        if split not in self._splits:
            found = class_of_root(self._root)
            assert found is not None
            key = f"data.root={self._root}"
            images: ImageSource = make_own(found[0], split, found[1], key=key, methods=METHODS)
            if fault := _fault(images):
                raise ConfigError(f"{key}: {split}: {fault}")
            self._splits[split] = images
        return self._splits[split]


def _fault(images: ImageSource) -> str | None:
    """Return what is wrong with the classes and labels, or None."""
    classes, labels_N = getattr(images, "classes", None), getattr(images, "labels_N", None)
    if not isinstance(classes, tuple) or not all(isinstance(name, str) for name in classes):
        return "classes must be a tuple of class names"
    if not isinstance(labels_N, np.ndarray) or labels_N.dtype != np.int64 or labels_N.shape != (len(images),):
        return f"labels_N must be an int64 array with a label for each of {len(images)} images"
    if not len(images) or labels_N.min() < 0 or labels_N.max() >= len(classes):
        return f"labels_N must hold positions in classes, from 0 to {len(classes) - 1}, for at least one image"
    return None
