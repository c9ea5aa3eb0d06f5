"""Replacement of bad images: which image, at which place, how many; the oracle is torchvision's resized_crop."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from error_texts import naming
from image_loaders import COMMON_SETTINGS
from PIL import Image, ImageFile
from sample_images import encoded, png_of, resized_crop, smooth_image, with_bad_tables, write
from torchvision.transforms.v2 import functional as vision

from bigbatch.errors import DataError, StorageError
from bigbatch.trainer.augment.crops import random_resized_crop
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.input import order
from bigbatch.trainer.input.base import Request
from bigbatch.trainer.input.data_root import open_split
from bigbatch.trainer.input.formats import open_image
from bigbatch.trainer.input.loaders.dali import DaliDecoder
from bigbatch.trainer.input.loaders.encoded import make_image_loader
from bigbatch.trainer.input.order import eval_requests, read_index

SIZE = 48
CROP = random_resized_crop(seed=3)
SETTINGS = COMMON_SETTINGS | {"crop": CROP, "image_size": SIZE}
UNDECODABLE = with_bad_tables(encoded(smooth_image(50)))


BAD = {
    "text": (b"<html>not found</html>", ("image", "replace")),
    "empty": (b"", ("image", "replace")),
    "cut off": (encoded(smooth_image(0))[:-300], ("decoded",)),
    "without its end": (encoded(smooth_image(0))[:-2], ("decoded",)),
    "cut off png": (encoded(smooth_image(0), "PNG")[:-900], ("decoded",)),
    "png without its end": (encoded(smooth_image(0), "PNG")[:-12], ("end mark", "replace")),
    "png with a bad end": (encoded(smooth_image(0), "PNG")[:-1] + b"?", ("end mark", "replace")),
    "cut off webp": (encoded(smooth_image(0), "WEBP")[:-100], ("image", "replace")),
    "gif": (encoded(smooth_image(0), "GIF"), ("not an image in JPEG, PNG or WebP", "replace")),
    "16 bits": (encoded(Image.new("I;16", (50, 50)), "PNG"), ("PNG in mode I;16", "8-bit JPEG, PNG or WebP")),
    "bad tables": (with_bad_tables(encoded(smooth_image(1))), ("decoded",)),
}


def whole(number):
    """Images of different sizes, so that a box shows whose size it was drawn for."""
    return encoded(smooth_image(number, 90 + 13 * (number % 9), 140 - 7 * (number % 11)))


def split(root, bad, *, num_images=8):
    """Two classes; bad gives what lies at some positions instead of an image."""
    names = [f"train/{'a' if n < num_images // 2 else 'b'}/{n:02d}.jpg" for n in range(num_images)]
    return read_index(write(root, {name: bad.get(n, whole(n)) for n, name in enumerate(names)}), "train")


@pytest.mark.parametrize(("mode", "marked"), [("P", bytes(200)), ("P", 3), ("L", 3), ("RGB", (1, 2, 3))])
def test_transparent_colours_change_no_pixel_and_warn_of_nothing(mode, marked, recwarn):
    image = smooth_image(0).convert(mode)
    found = open_image(encoded(image, "PNG", transparency=marked), path="a").convert("RGB")
    assert np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))
    assert not recwarn.list


def ask(*positions, epoch=0):
    return Request(epoch, np.array(positions), np.ones(len(positions), bool))


def stand_in(position, bad, num_images):
    while position in bad:
        position = (position + 1) % num_images
    return position


def expected_images(index, request, bad):
    """The box that is drawn for each position asked for, in the size of the image that stands in: (B, 3, S, S)."""
    used = [stand_in(position, bad, len(index)) for position in request.indices_B.tolist()]
    stored = [Image.open(index.name(position)).convert("RGB") for position in used]
    boxes_B4, flips_B = CROP(request.epoch, request.indices_B, np.array([(i.height, i.width) for i in stored]))
    resized = [
        resized_crop(vision.pil_to_tensor(image), box, size=SIZE)
        for image, box in zip(stored, boxes_B4.tolist(), strict=True)
    ]
    flipped = [vision.hflip(image) if flip else image for image, flip in zip(resized, flips_B, strict=True)]
    return torch.stack(flipped), index.labels_N[used], used


def check(loader, index, batch, bad):
    """A batch against the oracle; which exact bits is known for Pillow and torch alone."""
    request = batch.request
    expected_BCHW, labels, used = expected_images(index, request, bad)
    apart_B = (batch.images_BCHW.int() - expected_BCHW.int()).abs().double().mean((1, 2, 3))
    assert apart_B.max() <= (1.0 if isinstance(loader.decoder, DaliDecoder) else 0.0)
    assert batch.labels_B.tolist() == labels.tolist()
    is_own = [position == other for position, other in zip(request.indices_B.tolist(), used, strict=True)]
    assert batch.valid_B.tolist() == [own and valid for own, valid in zip(is_own, request.valid_B, strict=True)]
    positions = [position for position, own in zip(request.indices_B.tolist(), is_own, strict=True) if not own]
    assert [image.position for image in batch.replaced] == positions
    for replaced in batch.replaced:
        assert replaced.reason.startswith(f"{index.name(replaced.position)}: ")
        assert "\n" not in replaced.reason


@pytest.mark.parametrize("kind", BAD)
def test_bad_images_the_next_image_stands_in(make, tmp_path, kind):
    """3 is the last of its class: label, size and pixels come from the next class."""
    data, parts = BAD[kind]
    index = split(tmp_path, {3: data})
    loader = make(index, max_skipped=1)
    asked = [ask(0, 3, 4, 1), ask(3, 5, 3, 7), ask(2, 6, 3, 0, epoch=2)]
    batches = list(loader.load(asked))
    assert [batch.request for batch in batches] == asked
    for batch in batches:
        check(loader, index, batch, {3})
    assert all(part in bad.reason for part in parts for bad in batch.replaced)


def test_bad_images_padding_stays_invalid(make, tmp_path):
    index = split(tmp_path, {6: b"", 7: UNDECODABLE})
    loader = make(index, max_skipped=2, microbatch_size=3)
    batches = list(loader.load(eval_requests(num_samples=8, microbatch_size=3, rank=0, world_size=1)))
    for batch in batches:
        check(loader, index, batch, {6, 7})
    assert sum(int(batch.valid_B.sum()) for batch in batches) == 6


def test_bad_images_several_in_a_row_and_around_the_end(make, tmp_path):
    bad = {0: b"", 3: UNDECODABLE, 4: b"no", 5: UNDECODABLE, 6: whole(6)[:-50], 11: UNDECODABLE}
    index = split(tmp_path, bad, num_images=12)
    loader = make(index, max_skipped=len(bad), microbatch_size=6)
    for epoch in range(2):
        for batch in loader.load([ask(11, 3, 0, 5, 1, 7, epoch=epoch), ask(4, 6, 2, 10, 9, 11, epoch=epoch)]):
            check(loader, index, batch, bad)


def samples(loader, requests):
    """Image, label, validity and what was replaced of each request's samples, in order."""
    return [
        (batch.request.indices_B.tolist(), batch.images_BCHW.clone(), batch.labels_B.tolist(), batch.replaced)
        for batch in loader.load(requests)
    ]


def test_bad_images_what_is_known_to_be_bad_is_not_read_again(make, tmp_path, monkeypatch):
    bad, read = {1: b"", 6: UNDECODABLE}, []
    index = split(tmp_path, bad)
    monkeypatch.setattr(order, "read_file", lambda path: read.append(path) or Path(path).read_bytes())
    loader = make(index, max_skipped=2)
    assert len(list(loader.load([ask(0, 1, 2, 3), ask(4, 5, 6, 7)]))) == 2
    later = [ask(3, 1, 6, 0, epoch=1), ask(6, 1, 5, 4, epoch=2)]
    for batch in loader.load(later):
        check(loader, index, batch, bad)
    loader.close()
    assert len(list(loader.load(later))) == 2
    assert [read.count(index.name(position)) for position in bad] == [1, 1]


@pytest.mark.parametrize("content", [b"", UNDECODABLE], ids=["read", "decode"])
def test_bad_images_more_than_may_be_skipped_end_the_load_every_time(make, tmp_path, content):
    index = split(tmp_path, {1: content, 3: content, 6: content})
    loader = make(index, max_skipped=2, num_threads=1)
    asked = [ask(0, 1, 2, 3), ask(4, 5, 6, 7)]
    for _ in range(2):
        batches = loader.load(asked)
        check(loader, index, next(batches), {1, 3, 6})
        with pytest.raises(DataError) as caught:
            next(batches)
        text = str(caught.value)
        assert text.startswith("3 images are bad, and data.max_skipped=2: `bigbatch data check` lists all; ")
        assert f"the last is {index.name(6)}: " in text
        assert "\n" not in text
        assert not isinstance(caught.value, StorageError)


@pytest.mark.parametrize("content", [b"", UNDECODABLE], ids=["read", "decode"])
def test_bad_images_none_may_be_skipped(make, tmp_path, content):
    index = split(tmp_path, {1: content})
    with pytest.raises(DataError, match=naming("data.max_skipped=0", f"{index.name(1)}: ", "`bigbatch data check`")):
        list(make(index, max_skipped=0).load([ask(0, 1, 2, 3)]))
    with pytest.raises(DataError, match=rf"^{index.name(1)}: "):
        list(make(index).load([ask(0, 1, 2, 3)]))


@pytest.mark.parametrize("content", [b"", UNDECODABLE], ids=["read", "decode"])
def test_bad_images_a_split_of_bad_images_has_none_to_stand_in(make, tmp_path, content):
    index = split(tmp_path, dict.fromkeys(range(4), content), num_images=4)
    with pytest.raises(DataError, match=r"all 4 .*/0\d\.jpg: "):
        list(make(index, max_skipped=99).load([ask(0, 1, 2, 3)]))


def test_bad_images_storage_is_no_images_fault(make, tmp_path):
    index = split(tmp_path, {})
    (tmp_path / "train/a/02.jpg").unlink()
    with pytest.raises(StorageError, match=naming("train/a/02.jpg", os.strerror(errno.ENOENT))):
        list(make(index, max_skipped=8).load([ask(0, 1, 2, 3)]))


def test_bad_images_packed_images(make, tmp_path):
    """The packer lets no bad image in: it was damaged later, behind its header."""
    index = split(tmp_path / "folder", {})
    write(tmp_path / "folder", {f"val/{name}/0.jpg": whole(0) for name in "ab"})
    pack(tmp_path / "folder", tmp_path / "packed", recipe=PackRecipe())
    shard = tmp_path / "packed/train/shard-000000.tar"
    content, good = shard.read_bytes(), (tmp_path / "folder/train/a/03.jpg").read_bytes()
    assert content.count(good) == 1
    shard.write_bytes(content.replace(good, with_bad_tables(good)))
    packed = open_split(tmp_path / "packed", "train")
    loader = make(packed, max_skipped=1)
    (batch,), (theirs,) = (list(each.load([ask(0, 3, 4, 1)])) for each in (loader, make(index)))
    assert torch.equal(batch.images_BCHW[[0, 2, 3]], theirs.images_BCHW[[0, 2, 3]])
    assert [bad.position for bad in batch.replaced] == [3]
    with pytest.raises(DataError, match=naming("shard-000000.tar: image 00000003: ", "decoded")):
        list(make(packed).load([ask(0, 3, 4, 1)]))


def chunks(png):
    """(kind, content) of each."""
    at, found = 8, []
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        found.append((png[at + 4 : at + 8], png[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def with_bad_sum(png):
    """One bit of the checksum of its pixels is wrong."""
    at = png.index(b"IDAT")
    end = at + 4 + int.from_bytes(png[at - 4 : at], "big")
    return png[:end] + bytes([png[end] ^ 1]) + png[end + 1 :]


PNG = encoded(smooth_image(3, 120, 100), "PNG")
PALETTE = encoded(smooth_image(3, 120, 100).convert("P"), "PNG")
PILLOW_ALONE = {
    "wrong checksum": with_bad_sum(PNG),
    "unknown part": png_of(chunks(PNG)[0], (b"ABCD", b"?"), *chunks(PNG)[1:]),
    "no palette": png_of(*(part for part in chunks(PALETTE) if part[0] != b"PLTE")),
}


@pytest.mark.parametrize("kind", PILLOW_ALONE)
def test_bad_images_a_png_that_dali_alone_refuses_is_named(make, tmp_path, kind):
    index = split(tmp_path, {5: PILLOW_ALONE[kind]})
    asked = [ask(0, 1, 2, 3), ask(4, 5, 6, 7)]
    is_dali = isinstance(make(index).decoder, DaliDecoder)
    if not is_dali:
        for batch in make(index).load(asked):
            check(make(index), index, batch, set())
        return
    loader = make(index)
    batches = loader.load(asked)
    check(loader, index, next(batches), set())
    with pytest.raises(DataError, match=naming(f"{index.name(5)}: ", "DALI", "Pillow")):
        next(batches)
    skipping = make(index, max_skipped=1)
    for batch in skipping.load(asked):
        check(skipping, index, batch, {5})


def test_bad_images_what_pillow_stumbles_over_is_skipped(tmp_path):
    """An empty iCCP part behind the pixels gives an IndexError."""
    index = split(tmp_path, {3: png_of(*chunks(PNG)[:-1], (b"iCCP", b""), chunks(PNG)[-1])})
    loader = make_image_loader("torchvision", index, **(SETTINGS | {"max_skipped": 1}))
    for batch in loader.load([ask(0, 3, 4, 1)]):
        check(loader, index, batch, {3})
        assert ": cannot be decoded (" in batch.replaced[0].reason
    loader.close()


@pytest.mark.parametrize("step", [(Image, "open"), (ImageFile.ImageFile, "load")])
@pytest.mark.parametrize(
    ("raised", "expected", "says"), [(RuntimeError("odd"), DataError, "^x: .*odd"), (MemoryError(), MemoryError, "^$")]
)
def test_bad_images_any_error_but_a_lack_of_memory_names_the_image(step, raised, expected, says, monkeypatch):
    monkeypatch.setattr(*step, Mock(side_effect=raised))
    with pytest.raises(expected, match=says):
        open_image(whole(0), path="x")


def before_the_end(jpeg, part):
    end = jpeg.rindex(b"\xff\xd9")
    return jpeg[:end] + part + jpeg[end:]


PILLOW_REFUSES = {
    "bad table": before_the_end(whole(0), b"\xff\xc4\x00\x13\x00" + b"\xff" * 16),
    "second frame": before_the_end(whole(0), b"\xff\xc0\x00\x0b\x08\x00\x10\x00\x10\x01\x01\x11\x00"),
}


@pytest.mark.parametrize("microbatch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", PILLOW_REFUSES)
def test_bad_images_what_dali_decodes_is_not_blamed_for_what_else_is_in_flight(tmp_path, kind, microbatch_size):
    """Pillow refuses image 0 and 3, DALI refuses 3 alone."""
    pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    with pytest.raises(DataError):
        open_image(PILLOW_REFUSES[kind], path="")
    index = split(tmp_path, {0: PILLOW_REFUSES[kind], 3: UNDECODABLE})
    changed = {"microbatch_size": microbatch_size, "max_skipped": 2}
    loader = make_image_loader("dali", index, **(SETTINGS | changed))
    for _ in range(2):
        asked = [ask(*range(n, n + microbatch_size)) for n in range(0, 8, microbatch_size)]
        found = [bad for batch in loader.load(asked) for bad in batch.replaced]
        assert [bad.position for bad in found] == [3]
        assert ": cannot be decoded (broken data stream" in found[0].reason  # Pillow says why
    loader.close()


def test_bad_images_a_failure_that_no_single_image_causes_is_not_blamed_on_one(tmp_path):
    pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")

    def outside(epoch, indices_B, sizes_B2):
        return np.tile(np.array([[0, 0, 9999, 9999]], np.int32), (4, 1)), np.zeros(4, bool)

    loader = make_image_loader("dali", split(tmp_path, {}), **(SETTINGS | {"crop": outside, "max_skipped": 3}))
    with pytest.raises(RuntimeError) as caught:
        list(loader.load([ask(0, 1, 2, 3)]))
    assert not isinstance(caught.value, DataError)
    assert loader.reader.bad.reasons == {}
    loader.close()
