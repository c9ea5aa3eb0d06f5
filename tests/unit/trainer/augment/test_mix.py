"""MixUp and CutMix within ghost batches, against the papers' formulas sample by sample."""

import math

import numpy as np
import pytest
import torch

from bigbatch.trainer.augment.crops import uniforms
from bigbatch.trainer.augment.mix import Mix, cutmix_box, symmetric_beta

SPAN, NUM_CLASSES, HEIGHT, WIDTH = 4, 7, 12, 20
BOTH = {"mixup_alpha": 0.3, "cutmix_alpha": 1.0}
KINDS = [{"mixup_alpha": 0.3}, {"cutmix_alpha": 1.0}, BOTH]


def batch(num_ghosts):
    generator = torch.Generator().manual_seed(0)
    count = num_ghosts * SPAN
    images = torch.randn(count, 3, HEIGHT, WIDTH, generator=generator).contiguous(memory_format=torch.channels_last)
    return images, torch.randint(NUM_CLASSES, (count,), generator=generator), np.arange(300, 300 + 3 * count, 3)


def make(**alphas):
    return Mix(seed=11, num_classes=NUM_CLASSES, bn_span=SPAN, **alphas)


def beta(first, second, alpha):
    """Draw from Beta by the t distribution in its textbook steps, in Python floats. Source: Bailey 1994."""
    freedom = 2 * alpha
    student = math.sqrt(freedom * ((1 - first) ** (-2 / freedom) - 1)) * math.cos(2 * math.pi * second)
    return 0.5 + student / (2 * math.sqrt(freedom + student**2))


def expected(images, labels, indices, *, epoch, mixup_alpha=0.0, cutmix_alpha=0.0):
    """One sample after the other, in numpy: images and targets of each with its partner."""
    images, labels = images.double().numpy(), labels.numpy()
    mixed, targets = images.copy(), np.zeros((len(images), NUM_CLASSES))
    for row in range(len(images)):
        start = row - row % SPAN
        partner = row - 1 if row > start else start + SPAN - 1
        draws = uniforms(seed=11, epoch=epoch, indices_B=indices[start : start + 1], num_draws=5, stream=4)[0]
        is_mixup = mixup_alpha > 0 and (not cutmix_alpha or draws[0] < 0.5)
        lam = beta(draws[1], draws[2], mixup_alpha if is_mixup else cutmix_alpha)
        if is_mixup:
            mixed[row] = lam * images[row] + (1 - lam) * images[partner]
        else:
            x, y = int(draws[3] * WIDTH), int(draws[4] * HEIGHT)
            cut_w, cut_h = int(WIDTH * math.sqrt(1 - lam)), int(HEIGHT * math.sqrt(1 - lam))
            taken = 0
            for i in range(max(0, y - cut_h // 2), min(HEIGHT, y + cut_h // 2)):
                for j in range(max(0, x - cut_w // 2), min(WIDTH, x + cut_w // 2)):
                    mixed[row, :, i, j] = images[partner, :, i, j]
                    taken += 1
            lam = 1 - taken / (HEIGHT * WIDTH)
        targets[row, labels[row]] += lam
        targets[row, labels[partner]] += 1 - lam
    return mixed, targets


@pytest.mark.parametrize("alphas", KINDS)
def test_mix_images_and_targets_are_those_of_the_papers(alphas):
    images, labels, indices = batch(40)
    before = images.clone()
    mixed, targets = make(**alphas)(images, labels, epoch=3, indices_B=indices)
    expected_mixed, expected_targets = expected(images, labels, indices, epoch=3, **alphas)
    # fp32 against float64: two products and a sum of values below 6
    np.testing.assert_allclose(mixed.numpy(), expected_mixed, atol=2e-6)
    np.testing.assert_allclose(targets.numpy(), expected_targets, atol=3e-7)
    np.testing.assert_allclose(targets.sum(dim=1).numpy(), 1, atol=3e-7)
    assert targets.dtype == torch.float32
    assert mixed.dtype == images.dtype
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, before)
    assert not torch.equal(mixed, images)


def test_mix_half_precision_images_keep_their_type_and_exact_targets():
    images, labels, indices = batch(2)
    mixed, targets = make(mixup_alpha=0.3)(images.bfloat16(), labels, epoch=3, indices_B=indices)
    expected_mixed, expected_targets = expected(images, labels, indices, epoch=3, mixup_alpha=0.3)
    assert mixed.dtype == torch.bfloat16
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_allclose(mixed.float().numpy(), expected_mixed, atol=6 * 3 * 2**-8)  # values below 6
    np.testing.assert_allclose(targets.numpy(), expected_targets, atol=3e-7)


def beta_cdf(points, alpha, steps=200_000):
    """Numerically, in t = x^alpha, where the density is smooth up to x = 1/2; the rest by symmetry."""
    ends = np.linspace(0, 0.5**alpha, steps + 1)
    middles = (ends[1:] + ends[:-1]) / 2
    sums = np.concatenate([[0], np.cumsum((1 - middles ** (1 / alpha)) ** (alpha - 1))])
    half = np.interp(np.minimum(points, 1 - points) ** alpha, ends, sums / sums[-1] / 2)
    return np.where(points <= 0.5, half, 1 - half)


def test_mix_the_cdf_of_these_tests_is_right_where_it_has_a_closed_form():
    points = np.linspace(0, 1, 1001)
    np.testing.assert_allclose(beta_cdf(points, 1.0), points, atol=1e-9)
    np.testing.assert_allclose(beta_cdf(points, 2.0), 3 * points**2 - 2 * points**3, atol=1e-6)
    np.testing.assert_allclose(beta_cdf(points, 0.5), 2 / math.pi * np.arcsin(np.sqrt(points)), atol=1e-6)


# not below 0.2: there the values that round to 1 in float64 become a visible share (8% at 0.05)
@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0])
def test_mix_lam_has_the_beta_distribution(alpha):
    count = 40_000
    draws = uniforms(seed=1, epoch=0, indices_B=np.arange(count), num_draws=2)
    lams = np.sort(symmetric_beta(draws, alpha=alpha))
    assert lams[0] >= 0
    assert lams[-1] <= 1
    variance = 1 / (4 * (2 * alpha + 1))  # closed forms of the moments
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    assert abs(lams.mean() - 0.5) < 5 * math.sqrt(variance / count)
    assert abs(((lams - 0.5) ** 2).mean() - variance) < 5 * math.sqrt((fourth - variance**2) / count)
    cdf = beta_cdf(lams, alpha)
    ranks = np.arange(count + 1) / count
    distance = max((ranks[1:] - cdf).max(), (cdf - ranks[:-1]).max())
    assert distance < math.sqrt(-math.log(1e-6 / 2) / 2 / count)  # chance of a false alarm 1e-6


def test_mix_lam_at_the_ends_of_the_draws():
    last = 1 - 2**-53
    draws = np.array([[0.0, 0.0], [last, 0.0], [last, 0.5], [last, 0.25], [0.0, last]])
    for alpha in (1e-300, 0.01, 1.0, 100.0):
        lams = symmetric_beta(draws, alpha=alpha)
        assert ((lams >= 0) & (lams <= 1)).all()  # false for a nan
    assert symmetric_beta(draws, alpha=0.01)[:3] == pytest.approx([0.5, 1.0, 0.0])


def test_cutmix_box_is_cut_at_the_border():
    # sqrt(1 - 0.75) = half of each side: 6 x 10 pixels of 12 x 20
    assert cutmix_box(lam=0.75, centre=(0.5, 0.5), height=12, width=20) == (5, 3, 15, 9)
    assert cutmix_box(lam=0.75, centre=(0.0, 0.99), height=12, width=20) == (0, 8, 5, 12)
    x1, y1, x2, y2 = cutmix_box(lam=1.0, centre=(0.3, 0.3), height=12, width=20)
    assert (x2 - x1) * (y2 - y1) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("alphas", KINDS)
def test_mix_a_gpu_does_the_same_without_a_host_sync(alphas):
    images, labels, indices = batch(8)
    mix, on_gpu = make(**alphas), (images.cuda(), labels.cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixed, targets = mix(*on_gpu, epoch=0, indices_B=indices)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected_mixed, expected_targets = mix(images, labels, epoch=0, indices_B=indices)
    torch.testing.assert_close(mixed.cpu(), expected_mixed)
    torch.testing.assert_close(targets.cpu(), expected_targets)
    assert mixed.is_contiguous(memory_format=torch.channels_last)
