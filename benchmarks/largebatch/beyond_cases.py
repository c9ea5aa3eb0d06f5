"""What beyond.py compares, as data: forms of data sets, cases, and the rates that a search tries."""

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from benchmarks.largebatch.ablation_cases import OPTIMIZERS, RESIDENT, Case, Form
from benchmarks.largebatch.ablation_data import Images
from bigbatch.trainer.config.optimizer import is_foreign

COMPARED = ("lars", "lamb", "nesterov", "schedule-free", "muon", "shampoo")
REFERENCE = "nesterov"
"""Equal time is its time for the epochs of the form."""
FIRST_SHARES = (1 / 2, 1 / 4, 3 / 4)
"""Of the range of rates, that every search tries at first."""
NEAR = 1.05
"""A step that takes at most so many times the reference's has equal time in as many epochs."""

TINY = {
    **RESIDENT,
    "compute.cpu_threads": 1,
    "model.name": "resnet9",
    "model.width": 8,
    "schedule.warmup_epochs": 2,
}


def _form(config: str, images: Images, *, batches: tuple[int, ...]) -> Form:
    """Make a form of ten classes for one core, with trials as long as runs."""
    return Form(
        config=config,
        images=images,
        num_train=10 * images.train_per_class,
        settings={**TINY, "data.image_size": images.resize_to},
        epochs=10,
        batches=batches,
        seeds=(0, 1, 2),
        trials=5,
        tune_epochs=10,
        precision_batch=128,
        precision_epochs=1,
        images_per_second=None,
    )


FORMS = {
    ("shapes", "short"): _form("quickstart", Images(154, 100, resize_to=8), batches=(128, 512, 1536)),
    ("cifar10", "medium"): _form("cifar10", Images(500, 200, resize_to=16), batches=(128, 512, 2048)),
    ("imagenette", "medium"): _form("imagenette", Images(500, 200, resize_to=16), batches=(128, 512, 2048)),
    ("cifar10", "full"): Form(
        config="cifar10",
        images=Images(train_per_class=5000, val_per_class=1000, resize_to=None),
        num_train=50_000,
        settings={"model.width": 64, "schedule.warmup_epochs": 5},
        epochs=24,
        batches=(128, 512, 2048, 8192, 16384),
        seeds=(0, 1, 2),
        trials=16,
        tune_epochs=24,
        precision_batch=2048,
        precision_epochs=24,
        images_per_second=None,
    ),
}
"""The last batch leaves 1 to 3 steps an epoch, at which all of them are to break."""


def available(names: Sequence[str] = COMPARED) -> list[str]:
    """List those whose package is here."""
    homes = {name: str(OPTIMIZERS[name].settings["optimizer.name"]) for name in names}
    return [name for name in names if not is_foreign(homes[name]) or find_spec(homes[name].partition(".")[0])]


def case(form: Form, optimizer: str, batch: int, *, epochs: int | None = None) -> Case:
    """Describe the plain run of an optimizer at a batch; in fewer epochs where it is to take equal time."""
    epochs = epochs or form.epochs
    family = "batch" if epochs == form.epochs else "time"
    name = f"{optimizer} {batch}" + ("" if family == "batch" else f", {epochs} epochs")
    warmup = form.settings["schedule.warmup_epochs"] * epochs / form.epochs
    return Case(name, family, optimizer, batch, epochs, {"schedule.warmup_epochs": warmup})


def next_rate(optimizer: str, tried: Mapping[float, float | None]) -> float:
    """Return the rate that a search tries next, by the accuracy of each so far: None where it diverged.

    At first the middle and the quarters of the optimizer's range, in the logarithm. Then a step beyond the best where
    it lies at an end of those tried, even out of the range; else halfway to the better of its neighbours.
    """
    low, high = OPTIMIZERS[optimizer].lr_low, OPTIMIZERS[optimizer].lr_high
    if len(tried) < len(FIRST_SHARES):
        return low * (high / low) ** FIRST_SHARES[len(tried)]
    accuracies = {rate: -1.0 if accuracy is None else accuracy for rate, accuracy in tried.items()}
    rates = sorted(accuracies)
    best = rates.index(best_rate(tried))
    if best == 0:
        return rates[0] ** 2 / rates[1]
    if best == len(rates) - 1:
        return rates[-1] ** 2 / rates[-2]
    neighbour = max(rates[best - 1], rates[best + 1], key=accuracies.__getitem__)
    return math.sqrt(rates[best] * neighbour)


def best_rate(tried: Mapping[float, float | None]) -> float:
    """Return the rate with the best accuracy, the first tried among equals."""
    return max(tried, key=lambda rate: -1.0 if tried[rate] is None else tried[rate])  # type: ignore[arg-type,return-value]


def epochs_in_equal_time(form: Form, milliseconds: float, *, reference: float) -> int:
    """Return how many epochs fit into the time of the reference's, by the times of a step; at least 1."""
    if milliseconds <= NEAR * reference:
        return form.epochs
    return max(1, round(form.epochs * reference / milliseconds))
