"""Choose DistributedDataParallel's buckets and hook for a script: time its training steps with each choice in turns."""

import inspect
import math
import runpy
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bigbatch.comm.algorithms.hybrid import MeasuredTimes
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.ddp_hook import ddp_comm_hook
from bigbatch.errors import UserError
from bigbatch.tools.measure.timing import slowest
from bigbatch.tools.measure.whole_steps import noise_between
from bigbatch.trainer.machine.host import wait_for

CAPS_MIB = (5, 25, 100, 400)
"""Sizes of buckets to try, up to the size of all gradients; torch's default is 25, with a first bucket of 1."""
ROUNDS = 5
"""Turns of each candidate in each of the two parts of search()."""
WARM_UP_STEPS = 2
"""Steps of a turn that do not count: DDP builds its buckets again after the first step."""


@dataclass(frozen=True)
class Candidate:
    """Arguments of DistributedDataParallel that replace the script's own, and whether bigbatch's hook is registered."""

    buckets: tuple[tuple[str, Any], ...] = ()
    """Arguments by name; empty: as the script states them."""
    has_hook: bool = False

    def __str__(self) -> str:
        stated = ", ".join(f"{name}={value}" for name, value in self.buckets) or "as the script states"
        return f"{stated}, with our hook" if self.has_hook else stated


Measured = dict[Candidate, MeasuredTimes]
Turn = Generator[None, None, float]
"""Yields before each step of the script that is a part of the turn; returns the seconds per step."""
Search = Generator[None, None, Measured]


def make_candidates(gradient_bytes: int, *, has_list: bool) -> list[Candidate]:
    """Return the script's own arguments, then buckets of CAPS_MIB, alone and with a first bucket of 1 MiB. Pure.

    has_list: whether this torch has bucket_cap_mb_list; without it, a stated size also applies to the first bucket.
    """
    caps = [cap for cap in CAPS_MIB if cap << 20 < gradient_bytes]
    caps.append(next((cap for cap in CAPS_MIB if cap not in caps), CAPS_MIB[-1]))
    found = [Candidate()]
    for cap in dict.fromkeys(caps):
        found.append(Candidate((("bucket_cap_mb", cap),)))
        if has_list:
            found.append(Candidate((("bucket_cap_mb_list", (1, cap)),)))
    return found


def search(candidates: Sequence[Candidate], turn: Callable[[Candidate], Turn]) -> Search:
    """Time all candidates in turns; then time again the first, the fastest, and the fastest with the hook.

    Returns only the second times, because the fastest of many candidates is so partly by chance.
    """
    times = yield from _in_turns(candidates, turn)
    best = min(times, key=lambda each: times[each].median)
    finalists = dict.fromkeys((candidates[0], best, Candidate(best.buckets, has_hook=True)))
    return (yield from _in_turns(list(finalists), turn))


def _in_turns(candidates: Sequence[Candidate], turn: Callable[[Candidate], Turn]) -> Search:
    seconds: dict[Candidate, list[float]] = {each: [] for each in candidates}
    for number in range(ROUNDS):
        for each in candidates[:: -1 if number % 2 else 1]:  # so that a drift of the machine affects all equally
            seconds[each].append((yield from turn(each)))
    return {each: MeasuredTimes(tuple(times)) for each, times in seconds.items()}


def gain(slow: MeasuredTimes, fast: MeasuredTimes) -> float:
    """Return the share of a step that fast saves; 0 within noise. Pure."""
    saved = slow.median - fast.median
    return saved / slow.median if saved > noise_between(fast, slow) else 0.0


def explain(measured: Measured) -> list[str]:
    """Return lines on the times, the buckets and the hook. The first candidate is the script's own. Pure."""
    lines = [
        f"  {times.median * 1e3:9.2f} ms a step, +-{times.noise:.1%}  {each}; n = {len(times.seconds)} turns"
        for each, times in measured.items()
    ]
    stated, *others = measured
    plain = next((each for each in others if not each.has_hook), stated)
    hooked = next(each for each in others if each.has_hook)
    saved = gain(measured[stated], measured[plain]) if plain != stated else 0.0
    chosen = plain if saved else stated
    if chosen == stated:
        lines.append("buckets: keep what the script states: no other size is faster beyond noise")
    else:
        name, value = chosen.buckets[0]
        cap, first = (value[1], value[0]) if name == "bucket_cap_mb_list" else (value, value)
        argument = f"DistributedDataParallel(..., {name}={list(value) if name == 'bucket_cap_mb_list' else value})"
        lines.append(f"buckets: bucket_cap_mb {cap}, first bucket {first} MiB: {saved:.1%} faster: {argument}")
    pays = gain(measured[chosen], measured[hooked])
    if pays:
        buckets = "" if hooked.buckets == chosen.buckets else f", with {Candidate(hooked.buckets)}"
        how = f"model.register_comm_hook(None, ddp_comm_hook(communicator)){buckets}"
        lines.append(f"hook: pays, {pays:.1%} faster: {how}")
    else:
        lines.append("hook: does not pay: it is not faster beyond noise")
    return lines


class _Finished(BaseException):
    """Ends the script; not an Exception, which the script may catch."""


class _Tuner:
    """Counts the steps of the script's model, and constructs DDP again with new buckets at each turn."""

    def __init__(self, steps: int, say: Callable[[str], None]) -> None:
        self.steps, self.say = steps, say
        self.communicator: Communicator | None = None
        self.measured: Measured = {}
        self._model: DistributedDataParallel | None = None
        self._own_hook: tuple[Any, Any] | None = None
        self._is_disturbed = False

    def init(self, model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        """Replace DDP's __init__: call it, and start to tune its model. Raises: UserError for a second model."""
        _OWN["__init__"](model, *args, **kwargs)
        if self._model is not None:
            raise UserError("comm tune --ddp: the script wraps two models in DistributedDataParallel; it tunes one")
        self._before = torch.compiler.disable(self._before_forward)  # a compiled model would trace it
        self._model, self._arguments, self.communicator = model, (args, kwargs), connect()
        if self.communicator.rank:
            self.say = lambda line: None
        num_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        has_list = "bucket_cap_mb_list" in inspect.signature(_OWN["__init__"]).parameters
        candidates = make_candidates(num_bytes, has_list=has_list)
        self._search = search(candidates, partial(self._turn, model, self.communicator))
        self.say(f"{self.communicator}; {num_bytes / 1e6:.1f} MB of gradients")

    def register(self, model: DistributedDataParallel, state: Any, hook: Any) -> None:
        """Replace DDP's register_comm_hook: call it, and keep the hook for turns without bigbatch's hook."""
        if model is self._model:
            self._own_hook = state, hook
        _OWN["register_comm_hook"](model, state, hook)

    def forward(self, model: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        """Replace DDP's forward: count a step, then call it. Raises: _Finished after the last turn."""
        self._before(model)
        return _OWN["forward"](model, *inputs, **kwargs)

    def _before_forward(self, model: DistributedDataParallel) -> None:
        if self.measured:  # the script has caught it
            raise _Finished
        if model is self._model:
            if not (model.training and torch.is_grad_enabled()):
                self._is_disturbed = True  # an evaluation is not a step
            elif model.require_backward_grad_sync:
                try:
                    next(self._search)
                except StopIteration as end:
                    self.measured = end.value
                    raise _Finished from None

    def _turn(self, model: DistributedDataParallel, communicator: Communicator, candidate: Candidate) -> Turn:
        """Time the steps of a candidate, again if an evaluation disturbed them."""
        seconds = math.inf
        while seconds == math.inf:
            self._build(model, communicator, candidate)
            for _ in range(WARM_UP_STEPS):
                yield
            wait_for(communicator.device)
            start, self._is_disturbed = time.perf_counter(), False
            for _ in range(self.steps):
                yield
            wait_for(communicator.device)
            mine = (time.perf_counter() - start) / self.steps
            [seconds] = slowest([math.inf if self._is_disturbed else mine], communicator.connection)
        self.say(f"  {seconds * 1e3:9.2f} ms a step  {candidate}")
        return seconds

    def _build(self, model: DistributedDataParallel, communicator: Communicator, candidate: Candidate) -> None:
        """Construct DDP again around the same model, in the same object, because the script holds that object."""
        args, kwargs = self._arguments
        if candidate.buckets:
            kwargs = {name: value for name, value in kwargs.items() if not name.startswith("bucket_cap_mb")}
        stated = {name: list(value) if isinstance(value, tuple) else value for name, value in candidate.buckets}
        was_training = model.training
        _OWN["__init__"](model, *args, **kwargs, **stated)
        model.training = was_training
        if candidate.has_hook:
            _OWN["register_comm_hook"](model, None, ddp_comm_hook(communicator))
        elif self._own_hook:
            _OWN["register_comm_hook"](model, *self._own_hook)


_OWN: dict[str, Any] = {
    name: getattr(DistributedDataParallel, name) for name in ("__init__", "forward", "register_comm_hook")
}
"""DDP's own methods."""


def tune_script(script: Path, arguments: Sequence[str], *, steps: int, say: Callable[[str], None]) -> list[str]:
    """Run a script that trains with DDP, time its steps, and end it; return the lines of the result, on rank 0 only.

    Collective over the job's ranks. steps: number of steps that each turn times. A step lasts from one forward pass
    whose gradients are averaged to the next, and includes input, microbatches in no_sync(), and the update.
    Raises: UserError if the script wraps no model, or two, or ends before all is measured; SystemExit if the script
    ends itself with an error.
    """
    tuner = _Tuner(steps, say)
    argv, path = sys.argv, sys.path[:]
    try:
        sys.argv, sys.path[:1] = [str(script), *arguments], [str(script.parent)]
        for name, method in zip(_OWN, (tuner.init, tuner.forward, tuner.register), strict=True):
            setattr(DistributedDataParallel, name, lambda *args, _of=method, **options: _of(*args, **options))
        runpy.run_path(str(script), run_name="__main__")
    except _Finished:
        pass
    except SystemExit as ended:
        if ended.code and not tuner.measured:  # its own error, such as a wrong argument
            raise
    finally:
        for name, own in _OWN.items():
            setattr(DistributedDataParallel, name, own)
        sys.argv, sys.path[:] = argv, path
    if tuner.communicator is None:
        raise UserError(f"{script} made no DistributedDataParallel: --ddp takes a script that trains with it")
    if not tuner.measured:
        raise UserError(f"{script} ended before all was measured: let it train longer, or lower --steps {steps}")
    lines = explain(tuner.measured) if tuner.communicator.rank == 0 else []
    tuner.communicator.close()
    return lines
