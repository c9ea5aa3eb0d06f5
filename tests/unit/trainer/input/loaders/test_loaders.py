"""All loaders obey requests and boxes: compared with torchvision and numpy, on made and on real images."""

import io
import sys
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from error_texts import naming
from image_loaders import COMMON_SETTINGS, bigbatch_threads, resident
from PIL import Image
from sample_images import REAL_DATA, encoded, exif, resized_crop, smooth_image, write
from torchvision.transforms.v2 import functional as vision

from bigbatch.errors import ConfigError, DataError
from bigbatch.trainer.augment.crops import center_crop, padded_crop, random_resized_crop
from bigbatch.trainer.input.base import Request
from bigbatch.trainer.input.formats import encoded_size, jpeg_size, open_image, png_size, webp_size
from bigbatch.trainer.input.loaders import dali
from bigbatch.trainer.input.loaders.dali import DaliDecoder
from bigbatch.trainer.input.loaders.encoded import make_image_loader
from bigbatch.trainer.input.loaders.synthetic import SyntheticLoader
from bigbatch.trainer.input.order import eval_requests, read_index
from bigbatch.trainer.input.reading import prefetch

SIZE = 64
CROP = random_resized_crop(seed=7)
SETTINGS = COMMON_SETTINGS | {"crop": CROP, "image_size": SIZE}


def rotated():
    return encoded(smooth_image(3), exif=exif(6))  # by 90 degrees, to display


def every_kind():
    """What ImageNet holds: all of it under the name .JPEG."""
    return {
        "plain": encoded(smooth_image(0)),
        "grey": encoded(smooth_image(1).convert("L")),
        "progressive": encoded(smooth_image(2, width=90), progressive=True),
        "rotated": rotated(),
        "cmyk": encoded(smooth_image(4).convert("CMYK")),
        "png": encoded(smooth_image(5), "PNG"),
        "png-alpha": encoded(smooth_image(6).convert("RGBA"), "PNG"),
        "png-palette": encoded(smooth_image(7).convert("P"), "PNG"),
        "webp": encoded(smooth_image(9), "WEBP"),
        "webp-lossless-alpha": encoded(smooth_image(10).convert("RGBA"), "WEBP", lossless=True),
        "webp-rotated": encoded(smooth_image(11), "WEBP", exif=exif(6)),
        "444": encoded(smooth_image(8, height=300), quality=95, subsampling=0),
    }


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    files = {f"train/{number % 3}/{name}.JPEG": data for number, (name, data) in enumerate(every_kind().items())}
    return read_index(write(root, files), "train")


def requests(index, *, microbatch_size=4):
    return list(eval_requests(num_samples=len(index.paths), microbatch_size=microbatch_size, rank=0, world_size=1))


def expected_images(index, request, crop=CROP, size=SIZE, decoded=vision.pil_to_tensor):
    """torchvision's resized_crop of the stored image, flipped where asked: (B, 3, size, size)."""
    stored = [Image.open(index.name(position)) for position in request.indices_B]
    sizes_B2 = np.array([(image.height, image.width) for image in stored])
    boxes_B4, flips_B = crop(request.epoch, request.indices_B, sizes_B2)
    results = []
    for image, box, flip in zip(stored, boxes_B4.tolist(), flips_B, strict=True):
        image = decoded(image.convert("RGB"))
        if isinstance(image, torch.Tensor):
            image = resized_crop(image, box, size=size)
        else:
            image = vision.resized_crop(image, *box, [size, size], antialias=True)
        image = vision.hflip(image) if flip else image
        results.append(image if isinstance(image, torch.Tensor) else vision.pil_to_tensor(image))
    return torch.stack(results)


def test_loaders_integers_are_resized_as_numbers_are():
    """Rounded after each of two passes, by half a level at most; and as torchvision cuts."""
    image = vision.pil_to_tensor(smooth_image(0))
    ours = resized_crop(image, [3, 5, 90, 100], size=SIZE)
    exact = vision.resized_crop(image.double(), 3, 5, 90, 100, [SIZE, SIZE], antialias=True)
    assert ours.dtype == torch.uint8
    assert (ours - exact).abs().max() <= 1.01


def difference(batch, expected):
    """Mean absolute difference per image, in grey levels."""
    return (batch.images_BCHW.int() - expected.int()).abs().double().mean((1, 2, 3))


def is_exact(loader):
    return not isinstance(loader.decoder, DaliDecoder)


def test_loaders_images_labels_and_order_are_those_asked_for(make, index):
    loader = make(index)
    asked = requests(index)
    batches = list(loader.load(asked))
    assert len(batches) == len(asked) == 3
    for request, batch in zip(asked, batches, strict=True):
        assert batch.images_BCHW.shape == (4, 3, SIZE, SIZE)
        assert batch.images_BCHW.dtype == torch.uint8
        assert batch.images_BCHW.is_contiguous(memory_format=torch.channels_last)
        assert batch.labels_B.dtype == torch.int64
        assert batch.labels_B.tolist() == index.labels_N[request.indices_B].tolist()
        assert batch.valid_B.tolist() == request.valid_B.tolist()
        apart_B = difference(batch, expected_images(index, request))
        assert apart_B.max() <= (0 if is_exact(loader) else 1.0)


@pytest.mark.long
def test_loaders_real_images(make):
    if not REAL_DATA.is_dir():
        pytest.skip(f"no images at {REAL_DATA}; name a folder with val/<class>/ in BIGBATCH_REAL_DATA")
    index = read_index(REAL_DATA, "val")
    loader = make(index, image_size=224, microbatch_size=16)
    for request, batch in zip(
        requests(index, microbatch_size=16), loader.load(requests(index, microbatch_size=16)), strict=True
    ):
        apart_B = difference(batch, expected_images(index, request, size=224))
        assert apart_B.max() <= (0 if is_exact(loader) else 1.0)
        by_pillow = expected_images(index, request, size=224, decoded=lambda image: image)
        assert difference(batch, by_pillow).max() <= (0.25 if is_exact(loader) else 1.0)


@pytest.mark.parametrize("prefetch_batches", [1, 5])
def test_loaders_a_loader_serves_load_after_load(make, index, prefetch_batches):
    """Whole, shorter than the queue, empty, half consumed: none leaves anything behind for the next."""
    loader = make(index, prefetch_batches=prefetch_batches)
    asked = requests(index)
    whole = [batch.images_BCHW.clone() for batch in loader.load(asked)]
    for part in ([0, 1, 2], [1], [], [0, 1, 2] * 3, [2]):
        batches = list(loader.load([asked[number] for number in part]))
        assert len(batches) == len(part)
        assert all(torch.equal(b.images_BCHW, whole[n]) for b, n in zip(batches, part, strict=True))
    half = loader.load(asked * 3)
    assert torch.equal(next(half).images_BCHW, whole[0])
    again = loader.load(asked[1:])
    assert torch.equal(next(again).images_BCHW, whole[1])
    assert list(half) == []  # a new load ends the one before it
    assert torch.equal(next(again).images_BCHW, whole[2])
    half = loader.load(asked * 5)
    next(half)
    loader.close()
    loader.close()
    assert list(half) == []
    assert len(list(loader.load(asked))) == 3  # a closed loader may be used again


def test_loaders_requests_of_another_size_are_refused(make, index):
    with pytest.raises(ValueError, match=naming("3 samples", "microbatch_size is 4")):
        list(make(index).load(requests(index, microbatch_size=3)))


def test_loaders_a_part_of_a_png_that_pillow_chokes_on_is_named():
    whole = encoded(smooth_image(0), "PNG")
    short_gamma = b"\0\0\0\1gAMA\0" + zlib.crc32(b"gAMA\0").to_bytes(4, "big")
    with pytest.raises(DataError, match=naming("a.png: ", "replace")):
        open_image(whole[:33] + short_gamma + whole[33:], path="a.png")


def size_of(epoch):
    return {0: 32, 1: 56, 2: 32}[epoch]


def test_loaders_the_size_is_that_of_the_requests_epoch(make, index, monkeypatch):
    """Also where batches of two epochs are under way together; and one pipeline serves all sizes."""
    built, build = [], dali._build_pipeline
    monkeypatch.setattr(dali, "_build_pipeline", lambda *given, **named: built.append(1) or build(*given, **named))
    asked = [replace(request, epoch=epoch) for epoch in range(3) for request in requests(index)]
    loader = make(index, image_size=size_of, prefetch_batches=4)
    changing = [batch.images_BCHW.clone() for batch in loader.load(asked)]
    assert len(built) == (0 if is_exact(loader) else 1)
    assert [images.shape[2:] for images in changing] == [(size, size) for size in (32, 56, 32) for _ in range(3)]
    for size in (32, 56):
        constant = make(index, image_size=size, prefetch_batches=4)
        for request, images_BCHW, batch in zip(asked, changing, constant.load(asked), strict=True):
            if size_of(request.epoch) == size:
                assert torch.equal(images_BCHW, batch.images_BCHW)
                apart_B = difference(batch, expected_images(index, request, size=size))
                assert apart_B.max() <= (0 if is_exact(loader) else 1.0)


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "dali"), ("12.6", "dali-cuda12"), (None, "dali")])
def test_loaders_dali_missing_names_the_extra(monkeypatch, index, cuda, extra):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError, match=naming("data.loader=dali", f"pip install -e '.[{extra}]'")):
        make_image_loader("dali", index, **SETTINGS)


def test_loaders_dali_is_refused_for_a_gpu_of_amd(monkeypatch, index):
    pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    monkeypatch.setattr(torch.version, "hip", "7.1.25424", raising=False)
    make_image_loader("dali", index, **SETTINGS)  # on the CPU
    with pytest.raises(ConfigError, match=naming("data.loader=dali", "ROCm", "torchvision")):
        make_image_loader("dali", index, **SETTINGS, device_id=0)


def test_loaders_a_loader_that_does_not_exist_is_refused(index):
    with pytest.raises(ConfigError, match=naming("'DALI' ", "dali, torchvision")):
        make_image_loader("DALI", index, **SETTINGS)


def test_loaders_jpeg_size_reads_the_frame_header():
    for name, data in every_kind().items():
        image = Image.open(io.BytesIO(data))
        assert encoded_size(data, path=name) == (image.height, image.width)
        assert jpeg_size(data) == ((image.height, image.width) if image.format in ("JPEG", "MPO") else None)
    padded = encoded(smooth_image(0)).replace(b"\xff\xc0", b"\xff\xff\xff\xc0", 1)  # fill bytes are legal
    assert jpeg_size(padded) == (110, 150)
    assert jpeg_size(encoded(smooth_image(0))[:60]) is None


def test_loaders_png_size_reads_the_header_of_whole_8_bit_images(monkeypatch):
    for data in every_kind().values():
        image = Image.open(io.BytesIO(data))
        assert png_size(data) == ((image.height, image.width) if image.format == "PNG" else None)
    whole = encoded(smooth_image(0), "PNG")
    no_pixels = whole[:16] + bytes(8) + whole[24:]
    no_header = whole[:8] + whole[-12:]
    for data in (whole[:-1], whole[:40], no_pixels, no_header, no_header[:8] + b"\0\0\0\rIHDR" + no_header[12:]):
        assert png_size(data) is None
    assert png_size(encoded(Image.new("I;16", (5, 5)), "PNG")) is None
    monkeypatch.setattr(Image, "open", None)  # nothing is decoded to learn a size
    assert encoded_size(whole, path="whole.png") == (110, 150)


WEBP = {
    "lossy": encoded(smooth_image(0), "WEBP"),
    "lossless": encoded(smooth_image(0), "WEBP", lossless=True),
    "extended": encoded(smooth_image(0), "WEBP", exif=exif(6)),
    "animated": encoded(smooth_image(0), "WEBP", save_all=True, append_images=[smooth_image(1)]),
}


@pytest.mark.parametrize("kind", WEBP)
def test_loaders_webp_size_reads_the_header_of_whole_images(kind, monkeypatch):
    whole = WEBP[kind]
    assert {length for length in range(len(whole)) if webp_size(whole[:length])} == set()
    broken = [b"RIFX" + whole[4:], whole[:12] + b"VP9 " + whole[16:]]
    if kind in ("lossy", "lossless"):  # the mark of a bit stream
        at = 23 if kind == "lossy" else 20
        broken.append(whole[:at] + b"?" + whole[at + 1 :])
    assert [webp_size(data) for data in broken] == [None] * len(broken)
    monkeypatch.setattr(Image, "open", None)  # nothing is decoded to learn a size
    assert encoded_size(whole, path="whole.webp") == (110, 150)


def test_loaders_ahead_keeps_order_and_bounds_its_lead():
    drawn = []
    items = prefetch((drawn.append(n) or n for n in range(20)), depth=3)
    assert [next(items) for _ in range(5)] == list(range(5))
    items.close()
    assert drawn == list(range(len(drawn)))
    assert len(drawn) <= 5 + 3
    assert list(prefetch(iter(range(4)), depth=9)) == [0, 1, 2, 3]


def test_loaders_closing_ahead_ends_its_source():
    ended, before = [], bigbatch_threads()

    def source():
        try:
            yield from range(20)
        finally:
            ended.append("source")

    held = source()
    items = prefetch(held, depth=2, on_close=lambda: ended.append("asked"))
    next(items)
    items.close()
    assert ended == ["asked", "source"]
    assert not bigbatch_threads() - before


@pytest.fixture(scope="module")
def small_index(tmp_path_factory):
    files = {f"train/{n % 2}/{n}.png": encoded(smooth_image(n, 32, 32), "PNG") for n in range(7)}
    return read_index(write(tmp_path_factory.mktemp("small"), files), "train")


def test_loaders_resident_crops_as_a_padded_numpy_image(small_index):
    crop = padded_crop(seed=1, size=32, padding=4)
    loader = resident(small_index, crop=crop, image_size=32, microbatch_size=21, device="cpu")
    seen = set()
    for epoch in range(4):
        request = Request(epoch, np.arange(21) % 7, np.ones(21, bool))
        (batch,) = loader.load([request])
        boxes_B4, flips_B = crop(epoch, request.indices_B, np.full((21, 2), 32))
        for row, position in enumerate(request.indices_B):
            stored = np.asarray(Image.open(small_index.name(position)))
            top, left = boxes_B4[row, :2] + 4
            expected = np.pad(stored, ((4, 4), (4, 4), (0, 0)))[top : top + 32, left : left + 32]
            expected = expected[:, ::-1] if flips_B[row] else expected
            np.testing.assert_array_equal(batch.images_BCHW[row].permute(1, 2, 0), expected)
            seen.add(bool(flips_B[row]))
        assert batch.images_BCHW.is_contiguous(memory_format=torch.channels_last)
        assert batch.labels_B.tolist() == small_index.labels_N[request.indices_B].tolist()
    assert seen == {False, True}


def test_loaders_resident_on_the_host_makes_batches_there_for_the_device(small_index):
    crop = padded_crop(seed=1, size=32, padding=4)
    common = {"source": small_index, "crop": crop, "image_size": 32, "microbatch_size": 4}
    here, beside = (resident(**common, resident_on=memory) for memory in ("device", "host"))
    for one, other in zip(here.load(requests(small_index)), beside.load(requests(small_index)), strict=True):
        assert torch.equal(one.images_BCHW, other.images_BCHW)
        assert other.images_BCHW.is_contiguous(memory_format=torch.channels_last)
    # a device whose memory holds nothing: only batches get there
    away = resident(**common, device="meta", resident_on="host")
    assert {batch.images_BCHW.device.type for batch in away.load(requests(small_index))} == {"meta"}
    assert away._images_NHWC.device.type == "cpu"


def test_loaders_resident_evaluates_whole_images(small_index):
    loader = resident(small_index, crop=center_crop(fraction=1.0), image_size=32, microbatch_size=4)
    for _ in range(2):
        batches = list(loader.load(requests(small_index)))
        assert [batch.valid_B.tolist() for batch in batches] == [[True] * 4, [True] * 3 + [False]]
        for request, batch in zip(requests(small_index), batches, strict=True):
            for image, position in zip(batch.images_BCHW, request.indices_B, strict=True):
                stored = np.asarray(Image.open(small_index.name(position)))
                np.testing.assert_array_equal(image.permute(1, 2, 0), stored)


def test_loaders_resident_refuses_what_it_cannot_do(small_index, index):
    with pytest.raises(DataError, match=r"cmyk|png|plain|444") as caught:
        resident(index, crop=CROP, image_size=32, microbatch_size=1, device="cpu")
    assert index.name(0) in str(caught.value)  # the first one
    loader = resident(small_index, crop=CROP, image_size=32, microbatch_size=4, device="cpu")
    with pytest.raises(ValueError, match=naming("resident", "32 x 32")):
        list(loader.load(requests(small_index)))
    with pytest.raises(ValueError, match=naming("3 samples", "microbatch_size is 4")):
        list(loader.load(requests(small_index, microbatch_size=3)))


@pytest.mark.parametrize("kind", ["resident", "synthetic"])
def test_loaders_close_ends_an_iterator_on_the_device(small_index, kind):
    common = {"microbatch_size": 4, "device": "cpu"}
    if kind == "resident":
        loader = resident(small_index, crop=center_crop(fraction=1.0), image_size=32, **common)
    else:
        loader = SyntheticLoader(num_classes=3, image_size=lambda epoch: 32, **common)
    half = loader.load(requests(small_index))
    next(half)
    loader.close()
    loader.close()
    assert list(half) == []


def test_loaders_synthetic_repeats_one_batch():
    make = {"num_classes": 3, "image_size": lambda epoch: 8 << epoch, "microbatch_size": 4, "device": "cpu"}
    asked = list(eval_requests(num_samples=7, microbatch_size=4, rank=0, world_size=1))
    batches = list(SyntheticLoader(**make).load(asked))
    assert [batch.labels_B.tolist() for batch in batches] == [[0, 1, 2, 0], [1, 2, 0, 0]]
    assert [batch.valid_B.tolist() for batch in batches] == [[True] * 4, [True] * 3 + [False]]
    assert batches[0].images_BCHW.shape == (4, 3, 8, 8)
    assert batches[0].images_BCHW.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batches[0].images_BCHW, batches[1].images_BCHW)
    (larger,) = SyntheticLoader(**make).load([replace(asked[0], epoch=1)])
    assert larger.images_BCHW.shape == (4, 3, 16, 16)
    (other,) = SyntheticLoader(**make, seed=1).load(asked[:1])
    assert not torch.equal(other.images_BCHW, batches[0].images_BCHW)
    with pytest.raises(ValueError, match=naming("2 samples", "microbatch_size is 4")):
        list(SyntheticLoader(**make).load(eval_requests(num_samples=2, microbatch_size=2, rank=0, world_size=1)))
