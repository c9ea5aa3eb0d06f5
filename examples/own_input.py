"""A data set, a loader and an augmentation of your own: docs/input.md says how a config names them."""

import io
import zipfile

import numpy as np
import torch
from PIL import Image

from bigbatch.errors import StorageError
from bigbatch.trainer.input.base import Batch


class ZipImages:
    """Images of a split in a zip archive, as SPLIT/CLASS/IMAGE: an ImageSource."""

    def __init__(self, split, path):
        self._path, self._zip = path, zipfile.ZipFile(path)
        names = sorted(self._zip.namelist())
        self._names = [name for name in names if name.startswith(f"{split}/") and not name.endswith("/")]
        folders = [name.split("/")[1] for name in self._names]
        self.classes = tuple(sorted(set(folders)))
        self.labels_N = np.array([self.classes.index(folder) for folder in folders], np.int64)

    def __len__(self):
        return len(self._names)

    def name(self, position):
        return f"{self._path}/{self._names[position]}"

    def read(self, position):
        try:
            return self._zip.read(self._names[position])
        except OSError as error:  # read again for data.patience_seconds
            raise StorageError(f"{self.name(position)}: cannot be read ({error})") from error

    def sizes(self, positions_B):
        return None  # the loader takes them from the images

    def close(self):
        pass  # the archive stays open


class PlainLoader:
    """Decodes in the step, by Pillow alone: a Loader."""

    def __init__(self, setup):
        self.setup = setup

    def load(self, requests):
        source = self.setup.source
        for request in requests:
            images = [Image.open(io.BytesIO(source.read(position))).convert("RGB") for position in request.indices_B]
            sizes_B2 = np.array([(image.height, image.width) for image in images])
            boxes_B4, flips_B = self.setup.crop(request.epoch, request.indices_B, sizes_B2)
            size = self.setup.image_size(request.epoch)
            pixels = []
            for image, (top, left, height, width), flip in zip(images, boxes_B4.tolist(), flips_B, strict=True):
                box = image.resize((size, size), box=(left, top, left + width, top + height))
                pixels.append(np.array(box)[:, ::-1] if flip else np.array(box))
            yield Batch(
                images_BCHW=torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2),
                labels_B=torch.from_numpy(source.labels_N[request.indices_B]),
                valid_B=torch.from_numpy(request.valid_B),
                request=request,
            )

    def close(self):
        self.setup.source.close()


class Invert:
    """Inverts the colours of some images: an augmentation."""

    num_draws = 1

    def __init__(self, probability=0.5):
        self.probability = probability

    def __call__(self, images_BCHW, *, draws_BD):
        is_drawn_B = torch.from_numpy(draws_BD[:, 0] < self.probability).to(images_BCHW.device)
        return torch.where(is_drawn_B[:, None, None, None], 255 - images_BCHW, images_BCHW)
