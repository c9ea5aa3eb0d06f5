"""What beyond.py compares, as data: forms of data sets, cases, and the rates that a search tries."""

from collections.abc import Sequence
from importlib.util import find_spec

from benchmarks.largebatch.ablation_cases import OPTIMIZERS, RESIDENT, Case, Form
from benchmarks.largebatch.ablation_data import Images
from bigbatch.trainer.config.optimizer import is_foreign

COMPARED = ("lars", "lamb", "nesterov", "schedule-free", "muon", "shampoo")
REFERENCE = "nesterov"
"""Equal time is its time for the epochs of the form."""
NEAR = 1.05
"""A step that takes at most so many times the reference's has equal time in as many epochs."""

TINY = {
    **RESIDENT,
    "compute.cpu_threads": 1,
    "model.name": "resnet9",
    "model.width": 8,
    "schedule.warmup_epochs": 2,
    "data.image_size": 8,
}


def _form(config: str, images: Images) -> Form:
    """Make a form of ten classes for one core: 12, 3 and 1 steps an epoch, and trials as long as runs."""
    return Form(
        config=config,
        images=images,
        num_train=10 * images.train_per_class,
        settings=TINY,
        epochs=10,
        batches=(128, 512, 1536),
        seeds=(0, 1, 2),
        trials=4,
        tune_epochs=10,
        precision_batch=128,
        precision_epochs=1,
        images_per_second=None,
    )


FORMS = {
    ("cifar10", "short"): _form("cifar10", Images(154, 100, resize_to=8)),
    ("imagenette", "short"): _form("imagenette", Images(154, 100, resize_to=8)),
    ("shapes", "short"): _form("quickstart", Images(154, 100, resize_to=8)),
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
"""The last batch leaves 1 step an epoch in the short forms and 3 in the full one, at which all of them are to break."""


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


def rates(optimizer: str, *, trials: int) -> list[float]:
    """List the rates that a search tries: van der Corput's sequence in the logarithm, the middle of the range first."""
    low, high = OPTIMIZERS[optimizer].lr_low, OPTIMIZERS[optimizer].lr_high
    shares = [sum((n >> bit & 1) / 2 ** (bit + 1) for bit in range(n.bit_length())) for n in range(1, trials + 1)]
    return [low * (high / low) ** share for share in shares]


def epochs_in_equal_time(form: Form, milliseconds: float | None, *, reference: float | None) -> int:
    """Return how many epochs fit into the time of the reference's, by the times of a step; at least 1.

    All of them where nothing was timed, as every run ended in its first step.
    """
    if milliseconds is None or reference is None or milliseconds <= NEAR * reference:
        return form.epochs
    return max(1, round(form.epochs * reference / milliseconds))
