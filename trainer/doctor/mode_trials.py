"""Trials of modes on one rank's device, in a separate process: its hang or crash does not reach the run."""

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from bigbatch.comm.connection import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import UserError, first_line
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config, with_values
from bigbatch.trainer.config.trust import TRUST
from bigbatch.trainer.doctor.exchange import ANSWERS, CONFIG, ProbeChild, append, orders
from bigbatch.trainer.doctor.modes import Mode, Modes, Trial, disagreement
from bigbatch.trainer.machine.host import set_up_process
from bigbatch.trainer.machine.memory import is_out_of_memory
from bigbatch.trainer.memory.largest_batch import free_memory, run_steps
from bigbatch.trainer.step.cuda_graph import WARM_UP_STEPS
from bigbatch.trainer.step.loop import TrainStep
from bigbatch.trainer.step.plan import Parts
from bigbatch.trainer.step.precision import grads_of, set_tf32

COMMAND = "mode"
"""Subcommand of `bigbatch doctor` that runs in the separate process."""
TIMED_STEPS = 2
MIN_FREE = 0.1
"""Share of the device's memory that a mode must leave: for the sums over ranks, and for decoding."""


class ModeTrials:
    """Tries modes in a process, which it starts at the first trial, and again after a failure in it."""

    def __init__(
        self, config: Config, *, modes: Modes, device: torch.device, start: Callable[..., ProbeChild] = ProbeChild
    ) -> None:
        self._config, self._modes, self._device, self._start = config, modes, device, start
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = count()
        self._child: ProbeChild | None = None

    def __call__(self, mode: Mode, *, limit_seconds: float, meet: Callable[[], object]) -> Trial:
        """Time a mode within limit_seconds, and compare it with the stated one, which must be tried first.

        meet: waits for the other ranks; called once, when the mode is compiled and warm, so that all devices work while
        one is timed.
        """
        deadline = time.monotonic() + limit_seconds
        answer = self._attempt(self._prepare, mode, deadline=deadline)
        meet()
        if "is_ready" in answer:
            answer = self._attempt(self._ask, "time", deadline=deadline)
        if "failure" in answer:
            return Trial(refusal=str(answer["failure"]), is_cut=bool(answer.get("is_cut")))
        refusal = self._refusal(mode, answer)
        return Trial(refusal=refusal) if refusal else Trial(float(answer["images_per_second"]))

    def close(self) -> None:
        """End the process and remove its folder."""
        self._end()
        if self._folder is not None:
            self._folder.cleanup()

    def _refusal(self, mode: Mode, answer: Mapping[str, Any]) -> str:
        if mode == self._modes.stated:
            return ""  # it ran
        loss, gradients, free = (float(answer[name]) for name in ("loss", "gradients", "free_share"))
        if free < MIN_FREE:
            return f"it leaves {free:.0%} of the memory free, less than {MIN_FREE:.0%}"
        return disagreement(loss=loss, gradients=gradients, precision=self._config.optimizer.precision)

    def _attempt(self, ask: Callable[..., Mapping[str, Any]], detail: Any, *, deadline: float) -> Mapping[str, Any]:
        """Return the answer; on a failure end the process and return the reason."""
        try:
            return ask(detail, deadline=deadline)
        except (UserError, OSError) as error:
            self._end()
            return {"failure": first_line(error), "is_cut": time.monotonic() >= deadline}

    def _prepare(self, mode: Mode, *, deadline: float) -> Mapping[str, Any]:
        stated = self._modes.stated
        if self._child is None:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="bigbatch-mode-", ignore_cleanup_errors=True)
            folder = Path(self._folder.name) / str(next(self._numbers))
            seconds = deadline - time.monotonic()
            self._child = self._start(self._config, folder, num_ranks=1, start_seconds=seconds, command=COMMAND)
            if mode != stated and "is_ready" in self._ask("try", deadline=deadline, mode=stated):  # the reference
                self._ask("time", deadline=deadline)
        return self._ask("try", deadline=deadline, mode=mode)

    def _ask(self, what: str, *, deadline: float, mode: Mode | None = None) -> Mapping[str, Any]:
        assert self._child is not None
        details = {"num_images": self._modes.num_images, "device": str(self._device), "mode": mode and asdict(mode)}
        return self._child.ask(what, limit_seconds=deadline - time.monotonic(), **details)

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def main(argv: Sequence[str]) -> int:
    """Try modes as ModeTrials asks; argv: FOLDER and the process id of its parent.

    An error that is neither out-of-memory nor a UserError ends this process: after an error of the device nothing works
    in it.
    """
    folder, parent = Path(argv[0]), int(argv[1])
    # the run checked trust before it wrote this file
    config = load_config(["--config", str(folder / CONFIG), TRUST], prog="bigbatch doctor")
    append(folder / ANSWERS, {})
    reference: TrialStep | None = None
    waiting = orders(folder, is_running=lambda: psutil.pid_exists(parent))

    def pause() -> None:
        append(folder / ANSWERS, {"is_ready": True})
        next(waiting, None)  # "time"; none comes if the run has ended

    for order in waiting:
        device, mode = torch.device(order["device"]), Mode(**order["mode"])
        try:
            step = take_step(config, mode, num_images=order["num_images"], device=device, before_timed=pause)
        except (RuntimeError, MemoryError, UserError) as error:
            if not (isinstance(error, UserError) or is_out_of_memory(error)):
                raise
            answer: dict[str, Any] = {"failure": "out of memory" if is_out_of_memory(error) else first_line(error)}
        else:
            reference = reference or step  # the stated mode is tried first
            answer = {**step.figures, **step.distances(reference)}
        append(folder / ANSWERS, answer)
        free_memory(device)  # outside of the except block: the error's frames hold tensors
    return 0


class TrialStep:
    """Loss and gradients of a tried step, and its figures."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.loss = math.nan
        self.gradients_N = torch.zeros(0)

    def look(self, parts: Parts, train_step: TrainStep) -> None:
        """Read loss and gradients after a step; run_steps calls it."""
        loss, _, num_images = train_step.window.sums_3.tolist()  # of all steps, which are alike
        self.loss = loss / num_images
        grads = grads_of(parts.precision.masters.values())
        scale = float(parts.precision.scaled(torch.ones((), device=grads[0].device)))
        self.gradients_N = torch.cat([grad.flatten().float() for grad in grads]).cpu() / scale

    def distances(self, reference: "TrialStep") -> dict[str, float]:
        """Return distances of loss and gradients from the reference, relative to it; nan if one is not finite."""
        return {
            "loss": abs(self.loss - reference.loss) / abs(reference.loss) if reference.loss else abs(self.loss),
            "gradients": relative_distance(self.gradients_N, reference.gradients_N),
        }


def relative_distance(ours_N: Tensor, theirs_N: Tensor) -> float:
    """Return the L2 distance as a share of the length of theirs_N; 0 if both are 0, nan if one is not finite."""
    distance, length = float((ours_N - theirs_N).norm()), float(theirs_N.norm())
    return distance / length if length else distance and math.inf


def take_step(
    config: Config,
    mode: Mode,
    *,
    num_images: int,
    device: torch.device,
    before_timed: Callable[[], None] = lambda: None,
) -> TrialStep:
    """Train in that mode on generated images; return the last step. Raises: as run_steps."""
    step, size = TrialStep(), mode.microbatch_size
    set_tf32(config.optimizer.precision == "tf32")
    alone = connect(env=ALONE, device=device)
    set_up_process(alone, cudnn_benchmark=config.compute.cudnn_benchmark, cpu_threads=config.compute.cpu_threads)
    alone.connection.abandon()
    # as many untimed steps as a capture takes, for all modes alike: a loss scale changes with the steps
    seconds = run_steps(
        with_values(config, mode.values()),
        size,
        device=device,
        num_microbatches=num_images // size,
        num_untimed=WARM_UP_STEPS + 1,
        num_timed=TIMED_STEPS,
        before_timed=before_timed,
        look=step.look,
    )
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (1, 1)
    step.figures = {"images_per_second": num_images / seconds, "free_share": free / total}
    return step
