"""Modes of computing the same update, and the choice among them by measured rates. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bigbatch.trainer.config.batch import accumulation_steps, largest_divisor, ranks_per_ghost
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.doctor.speedups import try_values

MAX_IMAGES = 512
"""Largest microbatch that is tried, unless the config's own is larger. A tried step has at most two of that size."""
MIN_GAIN = 0.03
"""Gain in images/s below which the simpler mode stays: about the noise of two steps."""
BOUNDS = {"fp32": 2e-5, "tf32": 0.1, "fp16": 0.1, "fp16_autocast": 0.1, "bf16": 0.3, "bf16_autocast": 0.3}
"""Precision -> largest relative difference from the stated mode's loss: the bounds of law 1 (docs/design.md)."""
GRADIENT_BOUNDS = {**BOUNDS, "fp32": 0.01}
"""The same for the gradients; larger than law 1's bound in fp32, which holds for equal bits of the forward.

Another convolution algorithm changes outputs by a relative error e of rounding. A share of about e of the ReLUs then
switches, and passes or blocks the gradient of its pixel: gradients differ by about 4 sqrt(e). fp32 sums of 1,000 terms
have e = 2e-6, Winograd's somewhat more: 0.01 is e = 6e-6. 0.1 for fp16 and 0.3 for bf16 follow the same rule, with e =
2**-11 and 2**-8. The loss hardly depends on these ReLUs, so its bound finds an error of the forward.
"""


@dataclass(frozen=True)
class Mode:
    """A way to compute an update."""

    microbatch_size: int
    compile: str | None = None
    cuda_graph: bool = False

    def __str__(self) -> str:
        size = f"microbatch {self.microbatch_size}"
        how = ["compiled"] * (self.compile is not None) + ["CUDA graph"] * self.cuda_graph
        return ", ".join((size, *how)) if how else f"eager, {size}"

    def values(self) -> dict[str, Any]:
        return {
            "batch.microbatch_size": self.microbatch_size,
            "compute.compile": self.compile,
            "compute.cuda_graph": self.cuda_graph,
        }


@dataclass(frozen=True)
class Modes:
    """Modes of a config on a job: the stated one, and the changes to it that may be tried."""

    stated: Mode
    sizes: tuple[int, ...]
    """Microbatches, rising from the stated one."""
    num_images: int
    """Images of each tried step: a multiple of all sizes."""
    can_capture: bool = False
    can_compile: bool = False
    leaves_graph_out: bool = False
    """A CUDA graph is possible, but is not tried with several ranks."""

    @property
    def has_others(self) -> bool:
        return len(self.sizes) > 1 or self.can_capture or self.can_compile

    def __contains__(self, mode: Mode) -> bool:
        stated = self.stated
        return (
            mode.microbatch_size in self.sizes
            and mode.compile in (stated.compile, *(["default"] if self.can_compile else []))
            and mode.cuda_graph in (stated.cuda_graph, *([True] if self.can_capture else []))
        )

    def __str__(self) -> str:
        others = [f"microbatch {size}" for size in self.sizes[1:]]
        others += ["CUDA graph"] * self.can_capture + ["compiled"] * self.can_compile
        return ", ".join((str(self.stated), *others))


@dataclass(frozen=True)
class Trial:
    """Outcome of a tried mode: images/s of the slowest rank, or why it cannot be used."""

    images_per_second: float = 0.0
    refusal: str = ""
    is_cut: bool = False
    """Its time was up; another start may find the code that it compiled."""
    needs_seconds: float | None = None
    """Seconds that a start must have for its trials to try this mode, again or for the first time; None: never."""


def find_modes(config: Config, *, world_size: int) -> Modes:
    """Return the modes of a job on GPUs that keep the update; keys that the user states, or other keys fix, stay."""
    batch, compute, keeps = config.batch, config.compute, config.compute.mode_keeps
    stated = Mode(batch.microbatch_size, compute.compile, compute.cuda_graph)
    steps = accumulation_steps(batch, world_size=world_size)
    most = largest_divisor(steps, max(1, MAX_IMAGES // batch.microbatch_size))

    def is_legal(**changed: Any) -> bool:
        return isinstance(try_values(config, replace(stated, **changed).values(), world_size=world_size), Config)

    sizes = [batch.microbatch_size]
    is_measured = bool(config.run.digest_every_steps or config.run.noise_scale_every_steps)  # by microbatch
    # if several ranks share a ghost batch, another microbatch changes which ranks exchange statistics
    if not ("batch.microbatch_size" in keeps or is_measured) and ranks_per_ghost(batch) == 1:
        whole = [batch.microbatch_size * count for count in range(2, most + 1) if most % count == 0]
        sizes += [size for size in whole if is_legal(microbatch_size=size)]
    # a trial captures one image size and no sums over ranks: it does not prove that others can be captured
    can_capture = (
        len(config.data.train_sizes or ()) <= 1
        and not (config.run.digest_every_steps or "compute.cuda_graph" in keeps or compute.cuda_graph)
        and is_legal(cuda_graph=True)
    )
    num_images = batch.microbatch_size * most
    if sizes[-1] == num_images and steps > most:
        num_images *= 2  # a second microbatch shows the memory that accumulation takes
    return Modes(
        stated=stated,
        sizes=tuple(sizes),
        num_images=num_images,
        can_capture=can_capture and world_size == 1,
        can_compile=not ("compute.compile" in keeps or compute.compile) and is_legal(compile="default"),
        leaves_graph_out=can_capture and world_size > 1,
    )


def best_and_next(modes: Modes, tried: Mapping[Mode, Trial]) -> tuple[Mode, Mode | None]:
    """Return the best mode so far, and the one to try next, or None at the end.

    Larger microbatches come first, until one gains nothing; then a CUDA graph: each takes seconds. Compiling the best
    mode so far takes a minute or more and comes last: it is done once, and if it is cut, no other trial is lost.
    """
    best = modes.stated
    if best not in tried:
        return best, best
    if not tried[best].images_per_second:
        return best, None

    def is_better(mode: Mode) -> bool:
        return tried[mode].images_per_second > (1 + MIN_GAIN) * tried[best].images_per_second

    for size in modes.sizes[1:]:
        mode = replace(best, microbatch_size=size)
        if mode not in tried:
            return best, mode
        if not is_better(mode):
            break
        best = mode
    changes = [{"cuda_graph": True}] * modes.can_capture + [{"compile": "default"}] * modes.can_compile
    for changed in changes:
        mode = replace(best, **changed)
        if mode not in tried:
            return best, mode
        if is_better(mode):
            best = mode
    return best, None


def merge_ranks(trials: Sequence[Trial]) -> Trial:
    """Return the outcome for all ranks: the slowest one's rate, or the first refusal."""
    for rank, trial in enumerate(trials):
        if trial.refusal:
            where = f"rank {rank}: " if len(trials) > 1 else ""
            return replace(trial, refusal=f"{where}{trial.refusal}", images_per_second=0.0)
    return Trial(min(trial.images_per_second for trial in trials))


def disagreement(*, loss: float, gradients: float, precision: str) -> str:
    """Return why a step at these distances from the stated mode's is another update; "" if only rounding differs."""
    bounds = (("loss", loss, BOUNDS[precision]), ("gradient", gradients, GRADIENT_BOUNDS[precision]))
    for name, distance, bound in bounds:
        if distance != distance:
            return f"its {name} or that of the stated mode is not finite"
        if distance > bound:
            return f"its {name} differs from the stated mode's by {distance:.2g}, above {bound:g}"
    return ""


def with_mode(config: Config, mode: Mode, *, world_size: int) -> Config:
    """Return the config that computes in that mode, and does not choose again at the next start."""
    values = {**mode.values(), "compute.mode": "eager"}
    if config.compute.compile is None and mode.compile is not None:
        values["compute.compile_fallback"] = True  # a failure of auto's choice must not end the run
    changed = try_values(config, values, world_size=world_size)
    assert isinstance(changed, Config), changed
    return changed


def read_mode(record: Mapping[str, Any], *, modes: Modes) -> Mode:
    """Return the mode of a record. Raises: KeyError, TypeError or ValueError if it is none of these modes."""
    found, rates = Mode(**record["mode"]), record["images_per_second"]
    is_typed = type(found.microbatch_size) is int and type(found.cuda_graph) is bool
    if not is_typed or found not in modes:
        raise ValueError("its mode is none of this config's")
    are_rates = all(isinstance(rates[name], float) and 0 <= rates[name] < float("inf") for name in ("mode", "stated"))
    if not are_rates or (found != modes.stated and not rates["stated"]):  # 0: the stated mode's trial failed
        raise ValueError("it is damaged")
    return found


def write_mode(modes: Modes, tried: Mapping[Mode, Trial], *, best: Mode) -> dict[str, Any]:
    """Return the results as the part of a record that read_mode and describe read."""
    return {
        "mode": asdict(best),
        "images_per_second": {"mode": tried[best].images_per_second, "stated": tried[modes.stated].images_per_second},
        "is_cut": any(trial.is_cut for trial in tried.values()),
        "needs_seconds": min(
            (each.needs_seconds for each in tried.values() if each.needs_seconds is not None), default=None
        ),
        "tried": {str(mode): trial.refusal or trial.images_per_second for mode, trial in tried.items()},
    }


def describe(record: Mapping[str, Any], *, mode: Mode, modes: Modes) -> str:
    """Return the mode, its rate and that of the stated one."""
    rates = record["images_per_second"]
    if not rates["stated"]:
        return f"{modes.stated}, as stated, since its trial failed"
    line = f"{mode}: {rates['mode']:,.0f} images/s of each GPU"
    return line if mode == modes.stated else f"{line} ({modes.stated}: {rates['stated']:,.0f})"


def describe_refusals(tried: Mapping[Mode, Trial]) -> str:
    """Return which modes were refused or not tried, with the reasons; "" if none was."""
    verbs = {
        mode: "refused" if trial.is_cut or trial.needs_seconds is None else "not tried" for mode, trial in tried.items()
    }
    return "".join(f"; {mode} {verbs[mode]}: {trial.refusal}" for mode, trial in tried.items() if trial.refusal)
