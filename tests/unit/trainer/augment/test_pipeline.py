"""Augmentation of microbatches, compared with torchvision sample by sample and with the papers' words."""

import numpy as np
import pytest
import torch
from sample_images import smooth_image
from torchvision.transforms.v2 import ColorJitter, RandAugment, RandomErasing, TrivialAugmentWide
from torchvision.transforms.v2 import functional as vision

from bigbatch.parts import load
from bigbatch.trainer.augment import color_jitter, cutout, mix, rand_augment
from bigbatch.trainer.augment.crops import uniforms
from bigbatch.trainer.augment.cutout import Cutout
from bigbatch.trainer.augment.pipeline import AUGMENTATIONS, Augment, make_augment
from bigbatch.trainer.augment.rand_augment import MODERATE, Op, Ops, apply_ops
from bigbatch.trainer.config.sections import AugmentConfig

HEIGHT, WIDTH = 56, 72  # not square, so that an exchange of the two shows
TORCHVISION_OPS = list(RandAugment._AUGMENTATION_SPACE)
GEOMETRIC = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"}
MEAN = (124, 116, 104)
EVERYTHING = (
    color_jitter.ColorJitter(0.4),
    rand_augment.RandAugment(2, 9),
    rand_augment.TrivialAugment(),
    Cutout(16, MEAN),
    cutout.RandomErasing(0.5, MEAN),
)
RANGES = {RandAugment: MODERATE, TrivialAugmentWide: rand_augment.WIDE}


def channels_last(images_BHWC):
    return torch.from_numpy(np.ascontiguousarray(images_BHWC)).permute(0, 3, 1, 2)


def batch(count=12):
    """Smooth images, noise, a grey ramp, one colour, and an image of two values."""
    rng = np.random.default_rng(0)
    images = np.stack([np.asarray(smooth_image(seed, WIDTH, HEIGHT)) for seed in range(count)])
    images[1] = rng.integers(0, 256, images[1].shape)
    images[2] = np.linspace(0, 255, WIDTH)[None, :, None]
    images[3] = 77
    images[4] = 250 + rng.integers(0, 2, images[4].shape)
    return channels_last(images)


def assert_form(result, images):
    assert result.dtype == torch.uint8
    assert result.shape == images.shape
    assert result.is_contiguous(memory_format=torch.channels_last)


def torchvisions(image_CHW, name, magnitude, transform=RandAugment):
    """What RandAugment of torchvision does once it has drawn name and magnitude."""
    theirs = transform()
    return theirs._apply_image_or_video_transform(image_CHW, name, magnitude, theirs.interpolation, theirs._fill)


def torchvision_magnitude(name, magnitude, sign, transform=RandAugment):
    make, is_signed = transform._AUGMENTATION_SPACE[name]
    values = make(31, HEIGHT, WIDTH)
    if values is None:
        return 0.0
    return float(values[magnitude]) * (sign if is_signed else 1)


# --- colour jitter


@pytest.mark.parametrize("strength", [0.1, 0.4, 1.5])
def test_color_jitter_is_torchvisions_with_the_same_factors_and_order(strength):
    images = batch()
    draws = np.random.default_rng(1).random((len(images), 6))
    result = color_jitter.ColorJitter(strength)(images, draws_BD=draws)
    assert_form(result, images)
    low, high = ColorJitter(brightness=strength).brightness
    names = ("brightness", "contrast", "saturation")
    for image, ours, row in zip(images, result, draws, strict=True):
        for kind in np.argsort(row[3:]):
            adjust = getattr(vision, f"adjust_{names[kind]}")
            image = adjust(image, low + row[kind] * (high - low))
        # no rounding bound is needed: torchvision truncates after each step, and so do we
        assert torch.equal(ours, image)


# --- RandAugment and TrivialAugment


def test_rand_augment_ops_are_torchvisions_in_its_order():
    assert [op.name.replace("_", "") for op in Op] == [name.upper() for name in TORCHVISION_OPS]
    assert list(TrivialAugmentWide._AUGMENTATION_SPACE) == TORCHVISION_OPS


def compare_op(images, op, magnitude, sign, transform=RandAugment):
    """Share of values that differ from torchvision's, over the batch."""
    name = TORCHVISION_OPS[op]
    count = len(images)
    drawn = Ops(np.full(count, op), np.full(count, sign), np.full(count, magnitude), RANGES[transform])
    ours = apply_ops(images, drawn)
    assert_form(ours, images)
    size = torchvision_magnitude(name, magnitude, sign, transform)
    theirs = torch.stack([torchvisions(image, name, size, transform) for image in images])
    return (ours != theirs).double().mean().item()


@pytest.mark.parametrize("transform", RANGES)
@pytest.mark.parametrize("op", list(Op))
def test_apply_ops_each_is_torchvisions(op, transform):
    images = batch(6)
    # of a grid's sampling positions some tie between two pixels, and there torchvision's float32
    # matrix product rounds differently; all others and all colours are equal to the bit
    bound = 0.002 if TORCHVISION_OPS[op] in GEOMETRIC else 0.0
    for magnitude, sign in ((0, 1.0), (9, -1.0), (17, 1.0), (30, -1.0), (30, 1.0)):
        assert compare_op(images, op, magnitude, sign, transform) <= bound


@pytest.mark.parametrize("transform", RANGES)
@pytest.mark.parametrize("op", [Op.POSTERIZE, Op.SOLARIZE])
def test_apply_ops_every_magnitude_is_torchvisions(op, transform):
    assert max(compare_op(batch(5), op, magnitude, -1.0, transform) for magnitude in range(31)) == 0


def test_apply_ops_follow_each_other_as_drawn():
    images = batch(60)
    draws = np.random.default_rng(4).random((len(images), 4))
    colours = [number for number, name in enumerate(TORCHVISION_OPS) if name not in GEOMETRIC]
    chosen = np.random.default_rng(5).choice(colours, (len(images), 2))
    draws[:, ::2] = (chosen + draws[:, ::2]) / 14
    result = rand_augment.RandAugment(2, 12)(images, draws_BD=draws)
    assert_form(result, images)
    for image, ours, row, ops in zip(images, result, draws, chosen, strict=True):
        for number, op in enumerate(ops):
            name, sign = TORCHVISION_OPS[op], -1 if row[2 * number + 1] < 0.5 else 1
            image = torchvisions(image, name, torchvision_magnitude(name, 12, sign))
        assert torch.equal(ours, image)


def test_trivial_augment_is_torchvisions_with_each_images_own_draws():
    """All colours, at many magnitudes in one batch: equal to the bit."""
    images = batch(60)
    draws = np.random.default_rng(7).random((len(images), 3))
    colours = [number for number, name in enumerate(TORCHVISION_OPS) if name not in GEOMETRIC]
    chosen = np.resize(colours, len(images))
    draws[:, 0] = (chosen + draws[:, 0]) / 14
    result = rand_augment.TrivialAugment()(images, draws_BD=draws)
    assert_form(result, images)
    for image, ours, op, (_, magnitude, sign) in zip(images, result, chosen, draws, strict=True):
        name = TORCHVISION_OPS[op]
        size = torchvision_magnitude(name, int(magnitude * 31), -1 if sign < 0.5 else 1, TrivialAugmentWide)
        assert torch.equal(ours, torchvisions(image, name, size, TrivialAugmentWide))


# --- cutout


@pytest.mark.parametrize("size", [2, 16, 200])
def test_cutout_is_the_square_of_the_paper(size):
    images = batch()
    draws = np.random.default_rng(6).random((len(images), 2))
    draws[0], draws[1] = 0.0, 1 - 2**-53  # the corners
    result = Cutout(size, MEAN)(images, draws_BD=draws)
    assert_form(result, images)
    expected = images.numpy().copy()
    for image, (down, right) in zip(expected, draws, strict=True):
        y, x = int(down * HEIGHT), int(right * WIDTH)
        top, left = max(y - size // 2, 0), max(x - size // 2, 0)
        image[:, top : y + size // 2, left : x + size // 2] = np.array(MEAN).reshape(3, 1, 1)
    np.testing.assert_array_equal(result.numpy(), expected)


# --- random erasing


class Drawn:
    """Gives torchvision the draws of one image, in place of its generator's; its numbers are float32."""

    def __init__(self, row, monkeypatch):
        tries = iter([number for pair in zip(row[3:13], row[13:], strict=True) for number in pair])
        place = iter(row[1:3])
        monkeypatch.setattr(torch, "rand", lambda *size: torch.tensor([row[0]]))
        monkeypatch.setattr(
            torch.Tensor, "uniform_", lambda tensor, low, high: tensor.fill_(float(low + next(tries) * (high - low)))
        )
        monkeypatch.setattr(torch, "randint", lambda low, high, size: torch.tensor(int(next(place) * (high - low))))


def test_random_erasing_is_torchvisions_with_the_same_draws(monkeypatch):
    images = batch(40)[:, :, :24]  # flat images: many a try does not fit
    draws = np.random.default_rng(8).random((len(images), 23))
    draws[3, 3:13], draws[3, 13:] = 1.0, 1.0  # none fits
    draws[4, :13] = 0.0
    result = cutout.RandomErasing(0.75, MEAN)(images, draws_BD=draws)
    assert_form(result, images)
    theirs = RandomErasing(p=0.75, value=MEAN)
    for image, ours, row in zip(images, result, draws, strict=True):
        with monkeypatch.context() as patch:
            Drawn(row, patch)
            expected = theirs(image)
        assert torch.equal(ours, expected)
    changed = [not torch.equal(a, b) for a, b in zip(result, images, strict=True)]
    assert changed[4]
    assert not changed[3]
    erased = draws[:, 0] < 0.75
    erased[3] = False
    assert changed == erased.tolist()


# --- all together


def test_augment_draws_are_those_of_seed_epoch_and_stream():
    images, indices = batch(), np.arange(50, 62)
    before = images.clone()
    expected = images
    for each, (stream, num_draws) in zip(EVERYTHING, ((1, 6), (2, 4), (5, 3), (3, 2), (6, 23)), strict=True):
        draws_BD = uniforms(seed=5, epoch=2, indices_B=indices, num_draws=num_draws, stream=stream)
        expected = each(expected, draws_BD=draws_BD)
    result = Augment(5, EVERYTHING)(images, epoch=2, indices_B=indices)
    assert_form(result, images)
    assert torch.equal(result, expected)
    assert torch.equal(images, before)
    assert not torch.equal(Augment(5, EVERYTHING)(images, epoch=3, indices_B=indices), expected)
    assert not torch.equal(Augment(6, EVERYTHING)(images, epoch=2, indices_B=indices), expected)


def test_augmentations_of_a_config_are_those_that_it_asks_for():
    asked_for = (
        {"color_jitter": 0.4},
        {"randaugment_ops": 2, "randaugment_magnitude": 9},
        {"trivial_augment": True},
        {"cutout_size": 16},
        {"erasing_probability": 0.5},
    )
    everything = AugmentConfig(**{key: value for keys in asked_for for key, value in keys.items()})
    assert make_augment(everything, seed=5, fill=MEAN) == Augment(5, EVERYTHING)
    for keys, each in zip(asked_for, EVERYTHING, strict=True):
        assert make_augment(AugmentConfig(**keys), seed=5, fill=MEAN) == Augment(5, (each,))
    assert make_augment(AugmentConfig(), seed=5, fill=MEAN) is None


def test_augmentations_are_all_tested_together():
    """A new one gets its place in EVERYTHING."""
    assert [type(each) for each in EVERYTHING] == [load(path) for path, _ in AUGMENTATIONS.values()]


def test_augmentations_have_streams_of_their_own():
    """Crop and flip have 0. Those that exist keep their numbers: another one is another image."""
    streams = [load(path).stream for path, _ in AUGMENTATIONS.values()]
    assert len({0, mix.STREAM, *streams}) == 2 + len(streams)
    assert (*streams, mix.STREAM) == (1, 2, 5, 3, 6, 4)


@pytest.mark.gpu
def test_augment_a_gpu_does_the_same_without_a_host_sync():
    images, indices = batch(40), np.arange(40)
    augment = Augment(5, EVERYTHING)
    on_gpu = images.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = augment(on_gpu, epoch=0, indices_B=indices)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_form(result, images)
    apart = (result.cpu().int() - augment(images, epoch=0, indices_B=indices).int()).abs()
    # where a sampling position ties, or a product is a whole number, two devices may round apart
    assert (apart > 2).double().mean() < 0.005
