"""Images upright by their EXIF orientation and over a background, compared with Pillow's own functions."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from sample_images import REAL_DATA, encoded, exif, resized_crop, smooth_image, write
from torchvision.transforms.v2 import functional as vision

from bigbatch.trainer.augment.crops import center_crop, random_resized_crop
from bigbatch.trainer.config.sections import DataConfig
from bigbatch.trainer.input.base import LoaderSetup, Request
from bigbatch.trainer.input.formats import open_image
from bigbatch.trainer.input.loaders import encoded as encoded_loader
from bigbatch.trainer.input.loaders import resident
from bigbatch.trainer.input.order import ImageIndex, read_index
from bigbatch.trainer.input.shown import ShownImages, shown, turn_

KINDS = ("JPEG", "PNG", "WEBP")
DATA = DataConfig(exif_orientation=True, background="white", crop_area_min=0.35)
SIZE = 40


def rgba(seed: int, size: tuple[int, int] = (150, 110)) -> Image.Image:
    """An image with every degree of transparency."""
    image = smooth_image(seed, *size).convert("RGBA")
    image.putalpha(smooth_image(seed + 1, *size).convert("L"))
    return image


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> ImageIndex:
    """All orientations as JPEG, PNG and WebP, transparent images, and one that is both."""
    files = {}
    for orientation in range(9):
        for kind in KINDS:
            name = f"a/{orientation}.{kind.lower()}"
            files[name] = encoded(smooth_image(orientation), kind, exif=exif(orientation), **quality_of(kind))
    palette = rgba(1).quantize(64)  # keeps an alpha for each colour
    files["b/alpha.png"] = encoded(rgba(2), "PNG")
    files["b/alpha.webp"] = encoded(rgba(3), "WEBP", lossless=True, exact=True)
    files["b/grey.png"] = encoded(rgba(4).convert("LA"), "PNG")
    files["b/palette.png"] = encoded(palette, "PNG")
    files["b/key.png"] = encoded(smooth_image(5).quantize(16), "PNG", transparency=3)
    files["b/turned.png"] = encoded(rgba(6), "PNG", exif=exif(6))
    files["b/broken.jpg"] = encoded(smooth_image(7), exif=b"Exif\0\0nonsense")
    return read_index(write(tmp_path_factory.mktemp("shown"), {f"train/{n}": d for n, d in files.items()}), "train")


def quality_of(kind: str) -> dict[str, int]:
    return {"quality": 95} if kind == "WEBP" else {}


def as_pillow_shows(path: str, background: str = "white") -> Image.Image:
    """exif_transpose and alpha_composite, as scripts with Pillow call them."""
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, background), image).convert("RGB")


@pytest.mark.parametrize("loader", ["torchvision", "dali"])
@pytest.mark.parametrize("is_training", [True, False])
def test_shown_loaders_decode_as_pillow_shows(index, loader, is_training):
    """Crops and flips are drawn in the upright image, and each pixel is Pillow's within the rounding of resizing."""
    crop = random_resized_crop(seed=1, scale=(0.35, 1.0)) if is_training else center_crop(fraction=0.875)
    batch = load_all(index, replace(DATA, loader=loader), crop)
    whole = [as_pillow_shows(index.name(position)) for position in range(len(index))]
    boxes_B4, flips_B = crop(0, np.arange(len(index)), np.array([(image.height, image.width) for image in whole]))
    assert not is_training or 5 < flips_B.sum() < len(index) - 5
    for row, (image, box, flip) in enumerate(zip(whole, boxes_B4.tolist(), flips_B, strict=True)):
        expected = resized_crop(vision.pil_to_tensor(image), box, size=SIZE)
        expected = vision.hflip(expected) if flip else expected
        apart = (batch[row].int() - expected.int()).abs()
        # rows before columns rounds otherwise than columns before rows; DALI's JPEG decoder differs by a level or two
        name = index.name(row)
        assert apart.max() <= (1 if loader == "torchvision" else 6), name
        assert apart.double().mean() <= (0.2 if loader == "torchvision" else 1.0), name


def load_all(index, data, crop, size=SIZE):
    from bigbatch.trainer.build.input import READERS

    number = len(index)
    source = ShownImages(index, data, is_turned=data.loader not in READERS)
    make = resident.ResidentLoader if data.loader == "resident" else encoded_loader.make_loader
    setup = LoaderSetup(
        source=source,
        crop=crop,
        image_size=lambda epoch: size,
        microbatch_size=number,
        device=torch.device("cpu"),
        data=replace(data, image_size=size),
    )
    loader = make(setup)
    (batch,) = loader.load([Request(0, np.arange(number), np.ones(number, bool))])
    images = batch.images_BCHW.clone()
    loader.close()
    return images


def test_shown_resident_images_equal_the_other_loaders(tmp_path):
    """Square images, uncropped: nothing is resized, so all loaders give Pillow's pixels."""
    files = {f"{n}.png": encoded(smooth_image(n, SIZE, SIZE), "PNG", exif=exif(n)) for n in range(1, 9)}
    files["alpha.png"] = encoded(rgba(2, (SIZE, SIZE)), "PNG")
    index = read_index(write(tmp_path, {f"train/a/{name}": data for name, data in files.items()}), "train")
    expected = torch.stack([vision.pil_to_tensor(as_pillow_shows(index.name(row))) for row in range(len(index))])
    for loader in ("resident", "torchvision", "dali"):
        data = replace(DATA, loader=loader, resident_on="device" if loader == "resident" else None)
        assert torch.equal(load_all(index, data, center_crop(fraction=1.0)), expected), loader


@pytest.mark.parametrize("background", ["white", "black", "gray"])
def test_shown_whole_images_are_pillows(index, background):
    for position in range(len(index)):
        path, data = index.name(position), index.read(position)
        found = shown(data, path=path, background=background, is_turned=True)
        expected = as_pillow_shows(path, background)
        found = found or open_image(data, path=path).convert("RGB")
        assert (found.size, found.tobytes()) == (expected.size, expected.tobytes()), path


def test_shown_sources_keep_the_bytes_of_other_images(index):
    as_stored = ShownImages(index, DataConfig(exif_orientation=False, background="white"))
    for position in range(len(index)):
        is_transparent = Path(index.name(position)).parent.name == "b" and not index.name(position).endswith("jpg")
        assert (as_stored.read(position) == index.read(position)) is not is_transparent
    assert (len(as_stored), as_stored.classes, as_stored.name(0)) == (len(index), index.classes, index.name(0))


def test_shown_images_on_a_device_are_turned_in_place():
    """As after DALI on a GPU: codes up to 2 are finished, and each other row becomes what Pillow makes of it."""
    images_BHWC = torch.randint(256, (8, 6, 6, 3), dtype=torch.uint8)
    expected = []
    for row, orientation in enumerate(range(1, 9)):
        image = Image.fromarray(images_BHWC[row].numpy())
        image.getexif()[0x0112] = orientation
        expected.append(np.asarray(ImageOps.exif_transpose(image)) if orientation > 2 else images_BHWC[row].numpy())
    expected = np.stack(expected).copy()
    turn_(images_BHWC, np.arange(1, 9, dtype=np.uint8))
    assert (images_BHWC.numpy() == expected).all()


def test_shown_real_rotated_images_are_upright():
    if not REAL_DATA.is_dir():
        pytest.skip(f"no images at {REAL_DATA}; name a folder with val/<class>/ in BIGBATCH_REAL_DATA")
    with open(REAL_DATA / "manifest.csv") as file:
        rotated = [row for row in csv.DictReader(file) if int(row["exif_orientation"]) > 1]
    assert rotated
    for row in rotated:
        path = REAL_DATA / row["split"] / row["wnid"] / row["file"]
        found = shown(path.read_bytes(), path=str(path), background=None, is_turned=True)
        expected = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        assert found is not None
        assert (found.size, found.tobytes()) == (expected.size, expected.tobytes())
