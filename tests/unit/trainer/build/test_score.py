"""Own losses and metrics equal their formula for each image, or are refused with the reason."""

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from error_texts import naming
from torch import Tensor, nn

from bigbatch.errors import ConfigError
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.compute import make_loss, make_score
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.input.order import ImageIndex
from bigbatch.trainer.step.score import Metric, cross_entropies

CPU = torch.device("cpu")
HERE = "tests.unit.trainer.build.test_score"
K = 10


def cubed_gap(logits_BK: Tensor, targets: Tensor, *, power: int = 3) -> Tensor:
    shares_BK = targets if targets.ndim == 2 else F.one_hot(targets, K)
    return ((1 - (logits_BK.softmax(1) * shares_BK).sum(1)) ** power).float()


def indices_only(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    return -logits_BK[torch.arange(len(labels_B)), labels_B]


def depends_on_others(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    return logits_BK.sum(1) - logits_BK.mean()


def without_gradient(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    return (logits_BK.argmax(1) != labels_B).float()


def per_class(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    return logits_BK


def draws(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    torch.rand(3)
    return logits_BK.sum(1)


def breaks(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    raise KeyError("a\nb")


class WithWeights(nn.Linear):
    def __init__(self) -> None:
        super().__init__(K, 1)


class NotCalled:
    pass


class Share:
    """A metric: the quotient of two sums."""

    def __call__(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        return torch.stack([labels_B, torch.ones_like(labels_B)], dim=1)

    def result(self, sums_M: Tensor) -> Tensor:
        first, second = sums_M
        return first / second


class PythonShare(Share):
    def result(self, sums_M: Tensor) -> Tensor:
        first, second = sums_M.tolist()
        if first < 0:
            raise KeyError("below zero")
        return first / second


class BrokenShare(Share):
    def result(self, sums_M: Tensor) -> Tensor:
        return sums_M["first"]  # type: ignore[call-overload]


def config(*words: str) -> Config:
    return load_config(["--config", "quickstart", "--optimizer.label_smoothing=0", *words])


def noise(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, K, generator=generator), torch.randint(K, (count,), generator=generator)


def test_loss_is_summed_over_images() -> None:
    logits_BK, labels_B = noise(7)
    words = [f"--optimizer.loss={HERE}.cubed_gap", "--optimizer.loss_options={power: 2}"]
    own = make_loss(config(*words), CPU)(logits_BK, labels_B)
    expected = sum((1 - row.double().softmax(0)[label]) ** 2 for row, label in zip(logits_BK, labels_B, strict=True))
    assert float(own) == pytest.approx(float(expected), rel=1e-6)
    smoothed = make_loss(config("--optimizer.label_smoothing=0.1"), CPU)(logits_BK, labels_B)
    logs_BK = logits_BK.double().log_softmax(1)
    targets_BK = 0.9 * F.one_hot(labels_B, K) + 0.1 / K
    assert float(smoothed) == pytest.approx(float(-(targets_BK * logs_BK).sum()), rel=1e-6)


def split_of(labels: list[int], *names: str) -> build_input.Split:
    index = ImageIndex(root="", classes=names, paths=[str(each) for each in labels], labels_N=np.array(labels))
    unused: Any = None
    return build_input.Split(len(labels), unused, index)


NAMES = tuple(f"class {number}" for number in range(K))
LABELS = [*range(K), *[3] * 7, *[8] * 4]
"""Labels of a training set."""


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "weight", ["balanced", "[2, 0, 1, 1, 5, .5, 1, 1, 3, 1]", "{class 3: 0.25, class 8: 3}"], ids=["n", "list", "names"]
)
def test_class_weights_are_torchs_weighted_mean_over_the_training_set(weight: str, smoothing: float) -> None:
    """And their sum over microbatches is that over the whole batch, with labels and with shares of classes."""
    words = [f"--optimizer.loss_options={{weight: {weight}}}", f"--optimizer.label_smoothing={smoothing}"]
    ours = make_loss(config(*words), CPU, train=split_of(LABELS, *NAMES))
    counts = np.bincount(LABELS, minlength=K)
    stated = yaml.safe_load(weight)
    if stated == "balanced":
        stated = [len(LABELS) / (K * count) for count in counts]  # as scikit-learn's
    elif isinstance(stated, dict):
        stated = [stated.get(name, 1.0) for name in NAMES]
    weight_K = torch.tensor(stated, dtype=torch.float64)
    logits_BK, labels_B = torch.randn(len(LABELS), K, requires_grad=True), torch.tensor(LABELS)
    parts = zip(logits_BK.split(4), labels_B.split(4), strict=True)
    mean = sum(ours(*part) for part in parts) / len(LABELS)
    theirs_BK = logits_BK.detach().double().requires_grad_()
    expected = nn.CrossEntropyLoss(weight_K, label_smoothing=smoothing)(theirs_BK, labels_B)
    torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(mean, logits_BK)[0].double(),
        torch.autograd.grad(expected, theirs_BK)[0],
        rtol=1e-5,
        atol=1e-8,
    )
    shares_BK = torch.randn(len(LABELS), K).softmax(1)
    scaled_K = weight_K * len(LABELS) / (weight_K * torch.from_numpy(counts)).sum()
    smoothed_BK = (1 - smoothing) * shares_BK.double() + smoothing / K
    by_hand = -(scaled_K * smoothed_BK * logits_BK.detach().double().log_softmax(1)).sum()
    torch.testing.assert_close(ours(logits_BK, shares_BK).double(), by_hand, rtol=1e-6, atol=0)
    assert torch.equal(
        make_score(config(*words), CPU).losses(logits_BK, labels_B), cross_entropies(logits_BK, labels_B)
    )


def test_class_weights_of_generated_samples_and_of_trials_without_data() -> None:
    words = ["--optimizer.loss_options={weight: balanced}"]
    unused: Any = None
    generated = make_loss(config(*words), CPU, train=build_input.Split(3 * K, unused, None))
    logits_BK, labels_B = noise(6)
    expected = F.cross_entropy(logits_BK, labels_B, reduction="sum")
    torch.testing.assert_close(generated(logits_BK, labels_B), expected)
    torch.testing.assert_close(make_loss(config(*words), CPU)(logits_BK, labels_B), expected)
    huge = f"--optimizer.loss_options={{weight: {K * [1e308]}}}"
    torch.testing.assert_close(
        make_loss(config(huge), CPU, train=split_of(LABELS, *NAMES))(logits_BK, labels_B), expected
    )


@pytest.mark.parametrize(
    ("weight", "labels", "named"),
    [
        ("balanced", LABELS[1:], ("weight=balanced", "class 0 has no training image")),
        ("[1, 2]", LABELS, ("has 2 numbers", "data.num_classes=10")),
        ("[]", LABELS, ("has 0 numbers", "data.num_classes=10")),
        ("{clas 3: 2}", LABELS, ("no class clas 3", "class 3")),
        ("{3: 2}", LABELS, ("no class 3",)),
        ("[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]", LABELS[1:], ("0 for all classes",)),
    ],
)
def test_class_weights_that_do_not_fit_the_classes_are_refused(
    weight: str, labels: list[int], named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=naming("optimizer.loss_options: weight", *named)):
        make_loss(config(f"--optimizer.loss_options={{weight: {weight}}}"), CPU, train=split_of(labels, *NAMES))


def test_loss_of_torch_takes_lists_for_its_tensors() -> None:
    logits_BK, labels_B = noise(6)
    weight = [float(number) for number in range(1, K + 1)]
    options = f"--optimizer.loss_options={{weight: {weight}, reduction: none}}"
    expected = nn.CrossEntropyLoss(torch.tensor(weight), reduction="sum")(logits_BK, labels_B)
    for name in ("torch.nn.CrossEntropyLoss", "torch.nn.functional.cross_entropy"):
        own = make_loss(config(f"--optimizer.loss={name}", options), CPU)
        torch.testing.assert_close(own(logits_BK, labels_B), expected)


def test_loss_of_torch_takes_no_mean() -> None:
    logits_BK, labels_B = noise(6)
    words = ["--optimizer.loss=torch.nn.MultiMarginLoss", "--optimizer.loss_options={reduction: none, p: 2}"]
    expected = nn.MultiMarginLoss(p=2, reduction="sum")(logits_BK, labels_B)
    torch.testing.assert_close(make_loss(config(*words), CPU)(logits_BK, labels_B), expected)


def test_loss_is_also_that_of_the_evaluation() -> None:
    logits_BK, labels_B = noise(5)
    score = make_score(config(f"--optimizer.loss={HERE}.cubed_gap"), CPU)
    assert torch.equal(score.losses(logits_BK, labels_B), cubed_gap(logits_BK, labels_B))
    assert not score.metrics


def test_loss_is_tried_without_a_draw_from_the_run() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    make_loss(config(f"--optimizer.loss={HERE}.draws"), CPU)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("no_such_package.Loss", "null", ("no_such_package", "install the package")),
        (f"{HERE}.cubed_gup", "null", ("nearest is cubed_gap",)),
        (f"{HERE}.cubed_gap", "{powr: 2}", ("TypeError", "powr")),
        (f"{HERE}.WithWeights", "null", ("weights", "model")),
        (f"{HERE}.WithWeights", "{wide: 2}", ("wide", "options")),
        (f"{HERE}.NotCalled", "null", ("cannot be called",)),
        (f"{HERE}.breaks", "null", ("(4, 10)", "(4,)", "KeyError")),
        (f"{HERE}.depends_on_others", "null", ("in a batch with other images", "division")),
        (f"{HERE}.without_gradient", "null", ("no gradient",)),
        (f"{HERE}.per_class", "null", ("shape (4, 10)", "one number for each image")),
        ("torch.nn.CrossEntropyLoss", "null", ("shape ()", "reduction: none")),
        ("torch.nn.functional.cross_entropy", "null", ("shape ()", "reduction: none")),
    ],
)
def test_loss_that_does_not_fit_is_named_in_one_line(name: str, options: str, named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        make_loss(config(f"--optimizer.loss={name}", f"--optimizer.loss_options={options}"), CPU)
    message = str(refused.value)
    assert "\n" not in message
    assert re.search(naming(f"optimizer.loss={name}", *named), message)


def test_loss_must_take_shares_where_images_are_mixed() -> None:
    words = [f"--optimizer.loss={HERE}.indices_only", "--augment.mixup_alpha=0.2"]
    make_loss(config(words[0]), CPU)
    with pytest.raises(ConfigError, match=naming("targets of shape (4, 10)", "augment.mixup_alpha")):
        make_loss(config(*words), CPU)
    make_loss(config(f"--optimizer.loss={HERE}.cubed_gap", words[1]), CPU)


def test_metrics_leave_out_what_does_not_count() -> None:
    logits_BK, labels_B = noise(6)
    valid_B = torch.tensor([True, True, False, True, False, True])
    logits_BK[4] = torch.nan  # whatever stands there
    words = f"{{gap: {{name: {HERE}.cubed_gap, options: {{power: 1}}}}, share: {HERE}.Share}}"
    metrics = make_score(config(f"--run.metrics={words}"), CPU).metrics
    found = {
        name: metric.figure(metric.sums(logits_BK, labels_B, valid_B), count=4) for name, metric in metrics.items()
    }
    chosen = [(row.double(), int(label)) for row, label in zip(logits_BK[valid_B], labels_B[valid_B], strict=True)]
    gap = sum(float(1 - row.softmax(0)[label]) for row, label in chosen) / 4
    assert found == pytest.approx({"gap": gap, "share": sum(label for _, label in chosen) / 4})


@pytest.mark.parametrize("own", ["Share", "PythonShare"])
def test_metric_without_a_value_is_none(own: str) -> None:
    """The share of a class without an image: torch gives NaN or inf, and Python's numbers raise."""
    metric = make_score(config(f"--run.metrics={{mine: {HERE}.{own}}}"), CPU).metrics["mine"]
    assert metric.figure(torch.tensor([3.0, 4.0]), count=4) == 0.75
    for sums in ([0.0, 0.0], [1.0, 0.0], [torch.nan, 1.0]):
        assert metric.figure(torch.tensor(sums), count=4) is None
    if own == "PythonShare":
        with pytest.raises(ConfigError, match=naming("run.metrics: mine=", "result fails", "KeyError: 'below zero'")):
            metric.figure(torch.tensor([-1.0, 1.0]), count=4)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        *((name, ("own package",)) for name in ("subprocess.Popen", "os.system", "torch.load", "bigbatch.train")),
        (f"{HERE}.per_class", ("shape (4, 10)", "result")),
        (f"{HERE}.BrokenShare", ("result fails", "(2,)", "IndexError")),
        (f"{HERE}.depends_on_others", ("in a batch with other images",)),
    ],
)
def test_metric_that_does_not_fit_is_named_in_one_line(name: str, named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        make_score(config(f"--run.metrics={{mine: {name}}}"), CPU)
    message = str(refused.value)
    assert "\n" not in message
    assert re.search(naming(f"run.metrics: mine={name}", *named), message)


TINY = 2.0**-53
"""Half of the step of float64 above 1: two of them count, one at a time is lost."""


@pytest.mark.parametrize("is_on_grid", [False, True])
def test_metric_on_the_grid_has_one_sum_in_any_order(is_on_grid: bool) -> None:
    metric = Metric(lambda logits_BK, labels_B: logits_BK[:, 0], width=1, is_on_grid=is_on_grid)

    def total(*batches: list[float]) -> float:
        sums_1 = torch.zeros(1, dtype=torch.float64)
        for values in batches:
            logits_BK = torch.tensor(values, dtype=torch.float64)[:, None]
            kept = logits_BK.clone()
            count = len(values)
            sums_1 += metric.sums(logits_BK, torch.zeros(count).long(), torch.ones(count, dtype=torch.bool))
            assert torch.equal(logits_BK, kept)
        return float(sums_1)

    assert total([1.0], [TINY], [TINY]) == 1.0
    assert total([TINY, TINY], [1.0]) == (1.0 if is_on_grid else 1.0 + 2 * TINY)
    assert total([0.25, 3.0], [-2.5]) == 0.75
