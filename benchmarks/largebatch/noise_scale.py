"""Compare the gradient noise scale with the critical batch of trainings: does one predict the other here?

  python -m benchmarks.largebatch.noise_scale --out benchmarks/results/noise-scale-cpu.json --plot docs/noise-scale.png

Trainings of a small net on the generated data set, by our own training step, to one training loss over the whole set,
at batches that double. Each batch has its own rate: of a grid of factors sqrt(2), the one with the fewest steps, tuned
on a seed of its own. The critical batch is fitted to S = S_min (1 + B_crit / B) in the logarithm of steps; its band is
the 95% interval over resampled seeds. The noise scale is measured in the same runs, as `bigbatch tune batch` reads it.
Plain SGD at a constant rate, images drawn at random with replacement, no augmentation and no batch norm: the setting
that the theory is of. About 2 minutes on one core.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from benchmarks.record import conditions, spread, write_record
from bigbatch.colours import COLOURS
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.experiments.batch.critical import Pair, critical_batch, segments
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.input.base import Batch, Request
from bigbatch.trainer.input.prepare_batch import PrepareBatch
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.run.noise_scale import NoiseScale, unbiased
from bigbatch.trainer.step.accumulation import WideAccumulation
from bigbatch.trainer.step.gradient_noise import GradientNoise
from bigbatch.trainer.step.loop import TrainStep
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.precision import Precision
from bigbatch.trainer.step.statistics import StepStatistics

PIXELS, HIDDEN, CLASSES = 16, 64, 10
MICROBATCHES = 2
"""In a global batch."""
TUNING_SEED = 1_000
CHECKS = 1.02
"""Factor between the steps at which the loss of the whole set is computed: steps are known to 2%."""
MEASUREMENTS = 400
"""Measurements of the noise scale in a run, about."""
RESAMPLED = 1_000
NOBODY_ASKS: Any = None
"""A step checks no request to stop: the loop around it does."""
SCALES = "noise_scale_of_seeds"
LIKELY_STEPS, MOST_STEPS, EXPLODED = 300, 50_000, 20.0


@dataclass(frozen=True)
class Task:
    """The whole training set, as numbers around 0, and the target of a training on it."""

    images_BN: Tensor
    labels_B: Tensor
    target: float

    @cached_property
    def communicator(self) -> Communicator:
        """Return a job of one rank."""
        return connect(env=ALONE, backend="gloo")


@dataclass(frozen=True)
class Outcome:
    """The steps that a training needed; None if it did not reach the target."""

    steps: int | None
    pairs: tuple[Pair, ...] = ()


def main() -> None:
    """Tune, train, fit, write."""
    options = parse()
    facts = conditions(options)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        task = load(Path(folder), per_class=options.per_class, target=options.target)
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        # the rate of the batch before is near to its own
        rows.append(measure(task, batch=batch, seeds=options.seeds, lr=rows[-1]["lr"] if rows else options.lr))
        print(describe(rows[-1]), flush=True)
    record = {"benchmark": "noise scale", "conditions": facts, **summary(rows)}
    print(f"critical batch by steps: {record['critical_batch_by_steps']}")
    write_record(options.out, {**record, "batches": rows})
    if options.plot:
        draw(record, rows).savefig(options.plot, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024])
    add("--seeds", type=int, default=4, help="trainings at each batch, after those that choose its rate")
    add("--per-class", type=int, default=200, help="pictures")
    add("--target", type=float, default=0.8, help="training loss over the whole set, in nats")
    add("--lr", type=float, default=0.02, help="from where the search of rates begins")
    add("--plot", type=Path, help="PNG file for the curve")
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def load(folder: Path, *, per_class: int, target: float) -> Task:
    """Generate images, and decode them at a few pixels."""
    write_dataset(folder / "shapes", train_per_class=per_class, val_per_class=1)
    images, labels = [], []
    for label, name in enumerate(sorted(path.name for path in (folder / "shapes/train").iterdir())):
        for path in sorted((folder / "shapes/train" / name).iterdir()):
            small = Image.open(path).convert("RGB").resize((PIXELS, PIXELS), Image.Resampling.BOX)
            images.append(np.asarray(small, dtype=np.float32).ravel() / 64 - 2)
            labels.append(label)
    return Task(torch.from_numpy(np.stack(images)), torch.tensor(labels), target)


def measure(task: Task, *, batch: int, seeds: int, lr: float) -> dict[str, Any]:
    """Choose the batch's rate, and train with it by several seeds, measuring the noise scale."""
    best = tuned_rate(task, batch=batch, start=lr)
    outcomes = [train(task, batch=batch, lr=best, seed=seed, measures=True) for seed in range(seeds)]
    steps = [outcome.steps for outcome in outcomes if outcome.steps is not None]
    found = [noise_scale(outcome, batch=batch) for outcome in outcomes if outcome.steps is not None]
    return {
        "global_batch_size": batch,
        "lr": best,
        "reached": len(steps),
        "steps": spread(steps),
        "steps_of_seeds": steps,
        SCALES: [each.estimate for each in found],
        "bands_of_seeds": [[each.low, each.high] for each in found],
    }


def tuned_rate(task: Task, *, batch: int, start: float) -> float:
    """Climb from start over a grid of factors sqrt(2) to the rate with the fewest steps, by a seed of its own."""
    found: dict[int, float] = {}

    def steps_at(place: int) -> float:
        if place not in found:
            # a training slower than the best so far need not go on
            cap = min(found.values(), default=math.inf)
            outcome = train(task, batch=batch, lr=start * 2 ** (place / 2), seed=TUNING_SEED, cap=cap)
            found[place] = math.inf if outcome.steps is None else outcome.steps
        return found[place]

    place = 0
    while steps_at(place) == math.inf or steps_at(place + 1) < steps_at(place):
        place += 1 if steps_at(place) < math.inf else -1
    while steps_at(place - 1) < steps_at(place):
        place -= 1
    return start * 2 ** (place / 2)


def train(task: Task, *, batch: int, lr: float, seed: int, cap: float = math.inf, measures: bool = False) -> Outcome:
    """Train until the whole set's loss is at the target, for cap steps at most."""
    plan, parts = make_parts(make_model(seed), task.communicator, batch=batch, lr=lr, seed=seed)
    step, stream = TrainStep(plan, parts), InputStream(batches(task, size=batch // MICROBATCHES, seed=seed))
    # about as many measurements for any batch: steps are proportional to 1 + some hundred / batch
    every = max(1, round(LIKELY_STEPS * (1 + LIKELY_STEPS / batch) / MEASUREMENTS)) if measures else 0
    noise = GradientNoise(plan, parts, every_steps=every)
    done, check = 0, 1.0
    steps: int | None = None
    while done < min(cap, MOST_STEPS):
        noise.before_step(done)
        step(done, stream)
        done += 1
        noise.after_step(done)
        if done >= check:
            check = max(done + 1.0, CHECKS * done)
            loss = whole_loss(task, parts.model)
            if not loss < EXPLODED:
                break
            if loss <= task.target:
                steps = done
                break
    small = batch // MICROBATCHES
    pairs = [
        (unbiased(norms.microbatch, norms.global_batch, small_batch=small, large_batch=batch)[1], norms.global_batch)
        for norms in noise.take()
    ]
    parts.close()
    return Outcome(steps, tuple(pairs))


def make_model(seed: int) -> nn.Module:
    """Make the small net."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3 * PIXELS**2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def make_parts(model: nn.Module, communicator: Communicator, *, batch: int, lr: float, seed: int) -> tuple[Plan, Parts]:
    """Make the parts of a training step, as a run of one rank has them."""
    device = torch.device("cpu")
    precision = Precision(model, name="fp32", device=device)
    parts = Parts(
        model=model,
        statistics=StepStatistics(torch.zeros(0), microbatches=1),
        precision=precision,
        accumulation=WideAccumulation([]),
        optimizer=torch.optim.SGD(list(precision.masters.values()), lr=lr, fused=True),
        schedule=lambda step: lr,
        reducer=GradientReducer(model.named_parameters(), communicator),
        communicator=communicator,
        prepare=PrepareBatch(normalize=lambda images: images, device=device),
        normalize=lambda images: images,
        loss=lambda logits_BK, targets: F.cross_entropy(logits_BK, targets, reduction="sum"),
        stop=NOBODY_ASKS,
    )
    plan = Plan(
        seed=seed,
        first_step=0,
        num_steps=MOST_STEPS,
        steps_per_epoch=MOST_STEPS,
        accumulation_steps=MICROBATCHES,
        global_batch_size=batch,
        ghosts_per_microbatch=1,
        ranks_per_ghost=1,
        log_every_steps=MOST_STEPS,
        eval_every_steps=MOST_STEPS,
        eval_offset_steps=0,
        checkpoint_every_steps=0,
        compare_every_steps=0,
    )
    return plan, parts


def batches(task: Task, *, size: int, seed: int) -> Iterator[Batch]:
    """Draw microbatches for ever."""
    generator = torch.Generator().manual_seed(seed)
    request, valid_B = Request(0, np.arange(size), np.ones(size, bool)), torch.ones(size, dtype=torch.bool)
    while True:
        drawn_B = torch.randint(len(task.labels_B), (size,), generator=generator)
        yield Batch(task.images_BN[drawn_B], task.labels_B[drawn_B], valid_B, request)


@torch.no_grad()
def whole_loss(task: Task, model: nn.Module) -> float:
    """Return the mean loss over the training set."""
    return float(F.cross_entropy(model(task.images_BN), task.labels_B))


def noise_scale(outcome: Outcome, *, batch: int) -> NoiseScale:
    """Read the critical batch of a run from its noise scale; without bounds if it measured too little."""
    shares = segments(outcome.pairs)
    return critical_batch(shares, global_batch_size=batch) if shares else NoiseScale(None, 0.0, None)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fit the critical batch to the steps, with its band over resampled seeds, beside the noise scale's median."""
    sizes = [row["global_batch_size"] for row in rows]
    fitted = fit(sizes, [median(row["steps_of_seeds"]) for row in rows])
    generator = np.random.default_rng(0)
    again = [
        fit(sizes, [float(np.median(generator.choice(row["steps_of_seeds"], row["reached"]))) for row in rows])
        for _ in range(RESAMPLED)
    ]
    low, high = np.quantile([each["critical_batch"] for each in again], [0.025, 0.975])
    return {
        "critical_batch_by_steps": {**fitted, "low": float(low), "high": float(high)},
        "noise_scale_by_batch": {
            str(row["global_batch_size"]): median(math.inf if each is None else each for each in row[SCALES])
            for row in rows
        },
    }


def fit(sizes: Sequence[int], steps: Sequence[float]) -> dict[str, float]:
    """Fit S = S_min (1 + B_crit / B) by least squares of logarithms: B_crit on a fine grid, S_min in closed form."""
    grid = np.geomspace(min(sizes) / 10, max(sizes) * 10, 2000)
    shape = np.log1p(grid[:, None] / np.array(sizes)[None])
    offset = (np.log(steps)[None] - shape).mean(1)
    errors = np.square(np.log(steps)[None] - shape - offset[:, None]).mean(1)
    best = int(errors.argmin())
    return {
        "critical_batch": float(grid[best]),
        "fewest_steps": float(np.exp(offset[best])),
        "rms_error": float(np.sqrt(errors[best])),
    }


def describe(row: dict[str, Any]) -> str:
    """Write one batch as one line."""
    scales = [each for each in row[SCALES] if each is not None]
    return (
        f"batch {row['global_batch_size']:5}  lr {row['lr']:.4g}  steps {row['steps']['median']:.0f} "
        f"({row['steps']['min']:.0f} to {row['steps']['max']:.0f}, n = {row['reached']})  noise scale "
        f"{median(scales) if scales else math.nan:.0f}"
    )


def draw(record: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw steps over the batch with the fitted curve, and beside it the noise scale that the runs measured."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    steps_axes, scale_axes = figure.subplots(1, 2)
    sizes = [row["global_batch_size"] for row in rows]
    fitted = record["critical_batch_by_steps"]
    curve = np.geomspace(min(sizes), max(sizes), 200)
    for row in rows:
        places = [row["global_batch_size"]] * row["reached"]
        steps_axes.plot(places, row["steps_of_seeds"], "o", color=COLOURS[0], markersize=4)
        scale_axes.plot(places, [each or math.nan for each in row[SCALES]], "o", color=COLOURS[1], markersize=4)
    law = fitted["fewest_steps"] * (1 + fitted["critical_batch"] / curve)
    steps_axes.plot(curve, law, color="0.3", label="S_min (1 + B_crit / B), fitted")
    scale_axes.axhspan(fitted["low"], fitted["high"], color="0.85")
    scale_axes.axhline(fitted["critical_batch"], color="0.3", label="critical batch by steps, 95% band")
    steps_axes.set(ylabel="steps to the target, each seed", title="What trainings need")
    scale_axes.set(ylabel="pictures", title="Noise scale that these trainings measured")
    for axes in (steps_axes, scale_axes):
        axes.set(xscale="log", yscale="log", xlabel="global batch")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    for axes, middle in ((steps_axes, fitted["fewest_steps"]), (scale_axes, fitted["critical_batch"])):
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, middle / 2), max(high, 2 * middle))
        ticks = [float(f"{middle * 2**power:.1g}") for power in range(-6, 7)]
        axes.set_yticks([tick for tick in ticks if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]])
        axes.yaxis.set_major_formatter("{x:g}")
    return figure


if __name__ == "__main__":
    main()
