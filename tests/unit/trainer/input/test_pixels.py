"""An image that states too many pixels is never decoded, by any reader; other formats are not opened."""

import struct

import numpy as np
import pytest
from error_texts import naming
from image_loaders import COMMON_SETTINGS, made_loaders, resident
from PIL import GifImagePlugin, Image, ImageFile
from sample_images import encoded, png_of, smooth_image, write

from bigbatch.cli import main
from bigbatch.errors import DataError
from bigbatch.trainer.augment.crops import center_crop
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.datasets.verify_shards import verify
from bigbatch.trainer.input.formats import UnsupportedImageError, encoded_size, jpeg_size, open_image
from bigbatch.trainer.input.order import eval_requests, read_index
from bigbatch.trainer.input.shards import read_packed

PIXELS = 150 * 110
"""Pixels of a smooth_image; small limits show which code applies them."""
SETTINGS = COMMON_SETTINGS | {"crop": center_crop(), "image_size": 32, "microbatch_size": 1}


def png_header(width, height):
    """A whole PNG, one bit for a pixel; its pixels are 1 kB, whatever it states."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return png_of((b"IHDR", header), (b"IDAT", bytes(1000)), (b"IEND", b""))


def jpeg_header(width, height):
    data = encoded(smooth_image(0))
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def webp_header(width, height):
    """An animated one, for which libwebp sets the canvas aside as it is opened."""
    data = encoded(smooth_image(0), "WEBP", save_all=True, append_images=[smooth_image(1)])
    return data[:24] + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little") + data[30:]


BOMBS = {"PNG": png_header, "JPEG": jpeg_header, "WEBP": webp_header}


@pytest.fixture
def _no_decoding(monkeypatch):
    def refuse(*_):
        pytest.fail("decoded")  # no Exception, which open_image would catch

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    # of a WebP, its decoder is made as it is opened
    monkeypatch.setattr("PIL._webp.WebPAnimDecoder", refuse)


@pytest.mark.usefixtures("_no_decoding")
@pytest.mark.parametrize("kind", BOMBS)
def test_pixels_a_bomb_is_refused_before_it_is_decoded(kind):
    at_most = 8000, 6250  # 50 megapixels
    assert encoded_size(BOMBS[kind](*at_most), path="a") == at_most[::-1]
    with pytest.raises(pytest.fail.Exception, match="decoded"):
        open_image(BOMBS[kind](*at_most), path="a")
    for read in (encoded_size, open_image):
        with pytest.raises(UnsupportedImageError, match=naming("a: ", "8000 x 6251", "50 megapixels")) as error:
            read(BOMBS[kind](8000, 6251), path="a")
        assert "\n" not in str(error.value)
        with pytest.raises(UnsupportedImageError, match=naming("a: ", "200 x 201", "0.04 megapixels")):
            read(BOMBS[kind](200, 201), path="a", max_pixels=40_000)


@pytest.mark.usefixtures("_no_decoding")
def test_pixels_a_second_frame_header_does_not_hide_the_number():
    small, large = encoded(smooth_image(0)), jpeg_header(60_000, 60_000)
    frame = large[large.index(b"\xff\xc0") : large.index(b"\xff\xc0") + 19]
    at = small.index(b"\xff\xc0")
    hidden = small[: at + 19] + frame + small[at + 19 :]
    assert jpeg_size(hidden) is None
    assert jpeg_size(small[:at] + frame + small[at:]) is None
    with pytest.raises(DataError, match=naming("a: ", "remove")):
        open_image(hidden, path="a")


def test_pixels_other_formats_are_not_opened(monkeypatch):
    """Pillow knows dozens, some of which start other programs or take any size."""
    kinds = ("GIF", "TIFF", "BMP", "ICO", "PPM", "EPS", "TGA", "PDF", "JPEG2000", "AVIF", "DDS", "ICNS")
    Image.init()
    monkeypatch.setattr(GifImagePlugin.GifImageFile, "_open", lambda self: pytest.fail("opened"))
    for kind in kinds:
        if kind in Image.SAVE:
            with pytest.raises(DataError, match=naming("a: ", "not an image in JPEG, PNG or WebP")):
                open_image(encoded(smooth_image(0), kind), path="a")


@pytest.fixture
def data(tmp_path):
    """Four images of PIXELS in train, the third of which is larger by a row."""
    images = [smooth_image(n, 150, 111 if n == 2 else 110) for n in range(4)]
    files = {f"train/a/{n}.jpg": encoded(image) for n, image in enumerate(images)}
    return write(tmp_path / "data", files | {"val/a/0.jpg": encoded(smooth_image(9))})


@pytest.fixture(params=["folders", "packed"])
def index(request, data, tmp_path):
    if request.param == "folders":
        return read_index(data, "train")
    pack(data, tmp_path / "packed", recipe=PackRecipe())
    return read_packed(tmp_path / "packed/train")


def requests():
    return list(eval_requests(num_samples=4, microbatch_size=1, rank=0, world_size=1))


@pytest.mark.parametrize("name", ["torchvision", "dali"])
def test_pixels_of_training_are_those_of_the_setting(index, name):
    with made_loaders(name, SETTINGS) as make:
        assert len(list(make(index, max_pixels=150 * 111).load(requests()))) == 4
        with pytest.raises(DataError, match=naming(f"{index.name(2)}: ", "150 x 111", "0.0165", "max_megapixels")):
            list(make(index, max_pixels=PIXELS).load(requests()))
        skipping = make(index, max_pixels=PIXELS, max_skipped=1)
        replaced = [bad for batch in skipping.load(requests()) for bad in batch.replaced]
        assert [bad.position for bad in replaced] == [2]


def test_pixels_of_the_resident_loader(index):
    common = {"image_size": 32, "microbatch_size": 1, "device": "cpu"}
    with pytest.raises(DataError, match=naming("150 x 110", "0.016499 megapixels")):
        resident(index, crop=center_crop(fraction=1.0), max_megapixels=(PIXELS - 1) / 1e6, **common)


def test_pixels_of_packing_are_no_fact_of_the_shards():
    assert PackRecipe(max_pixels=1).made() == PackRecipe().made()


def test_pixels_verified_are_those_that_were_packed(data, tmp_path):
    """An image that was let in by the option is verified without it."""
    large = encoded(Image.fromarray(np.zeros((6400, 8000), bool)), "PNG")
    write(data, {"train/a/0.jpg": large})
    pack(data, tmp_path / "packed", recipe=PackRecipe(max_pixels=52_000_000), splits=["train"])
    assert verify(tmp_path / "packed") == 4


CHECK = ["data", "check", "data"]


@pytest.mark.parametrize("words", [CHECK, [*CHECK, "--no-decode"], ["init", "data"], ["data", "pack", "data", "new"]])
def test_pixels_of_commands(data, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(data, {"train/b/0.jpg": encoded(smooth_image(7)), "val/b/0.jpg": encoded(smooth_image(8))})
    write(data, {"val/a/1.jpg": png_header(20_000, 20_000)})
    for limit, stated in (([], "50 megapixels"), (["--max-megapixels", "0.01655"], "0.01655 megapixels")):
        assert main([*words, "--workers", "1", *limit]) == 1
        said = "".join(capsys.readouterr())
        assert stated in " ".join(said.split())
        assert "Traceback" not in said
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--max-megapixels", "179"])
    assert "above 0 and at most 178" in capsys.readouterr().err
    (data / "val/a/1.jpg").unlink()
    assert main([*words, "--workers", "1", "--max-megapixels", "178"]) == 0
    if words[0] == "init":
        assert "max_megapixels: 178" in (tmp_path / "data.yaml").read_text()
