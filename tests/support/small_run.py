"""A run of four steps on one rank, small enough for unit tests, and a recorder of what its loop asks for."""

import gc
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.config.batch import Division
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import SCALED
from bigbatch.trainer.input.base import Batch, Request
from bigbatch.trainer.input.prepare_batch import PrepareBatch
from bigbatch.trainer.loop import TrainingLoop
from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.norm import GhostBatchNorm2d, MicrobatchStatistics, flatten_running_statistics
from bigbatch.trainer.observe.exact_sums import ExactSums
from bigbatch.trainer.observe.hooks import HooksObserver, TrainingHooks
from bigbatch.trainer.observe.observer import Observed
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.step.accumulation import WideAccumulation, half_parameters
from bigbatch.trainer.step.loss_scale import Scaling
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.precision import COMPUTE_DTYPES, Precision
from bigbatch.trainer.step.statistics import StepStatistics
from bigbatch.trainer.step.stop_request import Joining, Stopped
from bigbatch.trainer.step.window import Totals

CPU = torch.device("cpu")
SPAN, ACCUMULATION, CLASSES, SMOOTHING = 4, 3, 5, 0.1
PLAN = Plan(
    seed=0,
    first_step=0,
    num_steps=4,
    steps_per_epoch=2,
    division=Division(ACCUMULATION, world_size=1),
    microbatches=range(ACCUMULATION),
    global_batch_size=SPAN * ACCUMULATION,
    ghosts_per_microbatch=1,
    log_every_steps=1,
    eval_every_steps=2,
    eval_offset_steps=0,
    checkpoint_every_steps=0,
    compare_every_steps=0,
)
SCALING = Scaling(initial=256.0, growth_steps=2)
"""Small enough to begin without overflow, and grows while we look."""
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True, fused=True),
    "lars inside": partial(LARS, momentum_form="lr_inside"),
    "lars outside": partial(LARS, momentum_form="lr_outside"),
}


def schedule(step: int) -> float:
    return 0.1 / (step + 1)


def make_parts(*, precision: str = "fp32", optimizer: str = "sgd") -> Parts:
    torch.manual_seed(0)
    communicator = connect(env=ALONE, backend="gloo", algorithm="ring")
    norm = partial(GhostBatchNorm2d, bn_span=SPAN, ghosts_per_step=1)
    model = build_model("resnet9", num_classes=CLASSES, norm=norm, width=2)
    statistics = StepStatistics(flatten_running_statistics(model), microbatches=ACCUMULATION)
    MicrobatchStatistics(model, statistics.running_N, take=statistics.take_)
    weights = Precision(model, name=precision, device=CPU, scaling=SCALING if precision in SCALED else None)

    def normalize(images_BCHW: Tensor) -> Tensor:
        return (images_BCHW.float() / 255).to(COMPUTE_DTYPES[precision])

    return Parts(
        model=model,
        statistics=statistics,
        precision=weights,
        accumulation=WideAccumulation(half_parameters(model)),
        optimizer=OPTIMIZERS[optimizer](list(weights.masters.values()), lr=1.0),
        schedule=schedule,
        reducer=GradientReducer(model.named_parameters(), communicator),
        communicator=communicator,
        prepare=PrepareBatch(normalize=normalize, device=CPU),
        normalize=normalize,
        loss=partial(F.cross_entropy, label_smoothing=SMOOTHING, reduction="sum"),
    )


def make_batches(count: int = PLAN.num_steps * ACCUMULATION) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            torch.randint(0, 256, (SPAN, 3, 16, 16), dtype=torch.uint8, generator=generator),
            torch.randint(0, CLASSES, (SPAN,), generator=generator),
            torch.ones(SPAN, dtype=torch.bool),
            Request(0, np.arange(SPAN), np.ones(SPAN, bool)),
        )
        for _ in range(count)
    ]


def num_alive(kind: str) -> int:
    """Objects whose class has that name, without those that only cycles hold."""
    gc.collect()
    return sum(type(each).__name__ == kind for each in gc.get_objects())


class Stop:
    """A request to stop that is due at that boundary, and at all later ones."""

    asked_by = "SIGINT"
    joining: Joining | None = None

    def __init__(self, at: float = math.inf) -> None:
        self.at = at
        self.num_passed = 0

    def is_due(self) -> bool:
        self.num_passed += 1
        return self.num_passed >= self.at

    def leave_if_due(self) -> None:
        if self.is_due():
            raise Stopped


class Recorder:
    """Takes the place of a run's evaluator, saver and output, and writes down what they are asked for."""

    found: tuple[dict[str, Any], ...] = ()
    """Results of the evaluations, which no checkpoint keeps here."""
    reason: str | None = None
    """Why the run ends after an evaluation."""

    def __init__(self, called: Callable[[str], object] = lambda what: None) -> None:
        """called: with "report", "evaluate" or "save", once it is written down."""
        self.called = called
        self.events: list[tuple[Any, ...]] = []
        self.records: list[dict[str, Any]] = []
        self.being_saved: int | None = None

    def report(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self.events.append(("report", record["step"]))
        self.called("report")

    def log(self, kind: str, record: dict[str, Any]) -> None:
        self.events.append((kind, record["step"], record["images"]))

    def say(self, text: str) -> None:
        pass

    def hint(self, text: str, *, step: int) -> None:
        pass

    def evaluate(self, done: int, **_: object) -> dict[str, Any]:
        self.events.append(("evaluate", done))
        self.called("evaluate")
        return {"top1": done / 100}

    def reason_to_end(self) -> str | None:
        return self.reason

    def start(self, *, done: int, top1: float | None, **_: object) -> None:
        assert self.being_saved is None, "one at a time"
        self.being_saved = done
        self.events.append(("save", done, top1))
        self.called("save")

    def collect(self, *, wait: bool) -> None:
        if wait:
            self.being_saved = None


@cache
def quickstart(*words: str) -> Config:
    return load_config(["--config", "quickstart", *words])


def train(
    plan: Plan,
    parts: Parts,
    recorder: Any,
    batches: Iterator[Batch],
    *,
    stop: Any = None,
    max_skipped: int = 99,
    **hooks: Callable[..., None],
) -> Totals:
    """The steps of a run; the recorder sees each."""
    config = quickstart(f"--data.max_skipped={max_skipped}")
    exact = [ExactSums(observed(config, plan, parts))] if parts.reducer.grid else []
    loop = TrainingLoop(
        config,
        plan,
        parts,
        evaluator=recorder,
        saver=recorder,
        output=recorder,
        stop=stop or Stop(),
        observers=[*exact, HooksObserver(TrainingHooks(**hooks))],
        skipped={},
    )
    return loop.run(batches)


def observed(config: Config, plan: Plan, parts: Parts, **others: Any) -> Observed:
    """What an observer gets of these parts, with others in place of a run's output."""
    return Observed(config=config, plan=plan, parts=parts, communicator=parts.communicator, say=print, **others)
