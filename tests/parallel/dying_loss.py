"""A loss of one's own in which ranks are lost: DIE="rank/step/where" of each, where in forward, sums, or update.

Or, of the first rank left when the store is lost: in listening, once it has opened the next one; in published, once it
has told the members there; in claimed, once it has taken over the run folder.

With DIE_BY another signal than SIGKILL is sent. With SAVE_SECONDS each checkpoint takes that much longer. With JOIN_AT
ranks join at the first boundary after so many steps, where the others wait; with JOIN_IN_EVALUATION at the first one in
an evaluation. A rank that joins is not lost again, but with DIE_JOINING once it has the state, and by
lost_before_the_state() before.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bigbatch.cli import main
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous import regroup
from bigbatch.comm.rendezvous.departure import Departure
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.trainer import build_run, joining
from bigbatch.trainer.checkpoint import saving
from bigbatch.trainer.folder import ownership
from bigbatch.trainer.step.precision import Precision
from bigbatch.trainer.step.stop_request import StopRequest

_steps_begun = 0
_done: set[str] = set()


def _die_if_due(where: str) -> None:
    for word in "" if read_process_env().joins else os.environ.get("DIE", "").split():
        if word == f"{read_process_env().rank}/{_steps_begun}/{where}" and word not in _done:
            _done.add(word)
            os.kill(os.getpid(), signal.Signals[os.environ.get("DIE_BY", "SIGKILL")])


_wait, _update_, _zero_grad = GradientReducer.wait, Precision.update_, GradientReducer.zero_grad
_save, _ask, _is_due = saving.save_checkpoint, Departure.ask, Departure.is_due
_leave_if_due, _take_over = StopRequest.leave_if_due, ownership.take_over
_open, _start = regroup._open_next_store, regroup.start_store
_evaluates = False


def _begin(reducer: GradientReducer) -> None:
    global _steps_begun
    _steps_begun += 1
    _zero_grad(reducer)


def _wait_for_sums(reducer: GradientReducer) -> None:
    _die_if_due("sums")
    _wait(reducer)


def _update(precision: Precision, *arguments: object, **options: object) -> None:
    _die_if_due("update")
    _update_(precision, *arguments, **options)  # type: ignore[arg-type]


def _open_next_store(*arguments: Any) -> Any:
    found = _open(*arguments)
    _die_if_due("published")
    return found


def _start_store(*arguments: Any, **options: Any) -> Any:
    connections = _start(*arguments, **options)
    _die_if_due("listening")
    return connections


def _succeed(*arguments: Any, **options: Any) -> Any:
    owner = _take_over(*arguments, **options)
    _die_if_due("claimed")
    return owner


def _save_late(*arguments: object, **options: object) -> Path:
    time.sleep(float(os.environ.get("SAVE_SECONDS", "0")))
    return _save(*arguments, **options)  # type: ignore[arg-type]


def _is_time_to_join() -> bool:
    is_there = _evaluates or "JOIN_IN_EVALUATION" not in os.environ
    return 0 < int(os.environ.get("JOIN_AT", "0")) <= _steps_begun and is_there


def _ask_in_time(departure: Departure, *, joins: bool = False) -> None:
    if not joins or _is_time_to_join():
        _ask(departure, joins=joins)


def _evaluate_batch(stop: StopRequest) -> None:
    global _evaluates
    _evaluates = True
    try:
        _leave_if_due(stop)
    finally:
        _evaluates = False


def _wait_for_join(departure: Departure) -> bool:
    is_awaited = _is_time_to_join() and "joined" not in _done
    while is_awaited and departure._control.world_size < read_process_env().world_size and not departure._has_told:
        time.sleep(0.01)
    is_due = _is_due(departure)
    _done.update(["joined"] if departure.is_join else [])
    return is_due


def _die(*arguments: object, **options: object) -> None:
    os.kill(os.getpid(), signal.Signals[os.environ.get("DIE_BY", "SIGKILL")])


if read_process_env().joins and "DIE_JOINING" in os.environ:
    build_run.regroup_parts = _die  # type: ignore[assignment]
regroup._open_next_store, regroup.start_store = _open_next_store, _start_store
ownership.take_over = _succeed
Departure.ask = _ask_in_time  # type: ignore[method-assign]
Departure.is_due = _wait_for_join  # type: ignore[method-assign]
StopRequest.leave_if_due = _evaluate_batch  # type: ignore[method-assign]
saving.save_checkpoint = _save_late
GradientReducer.zero_grad = _begin  # type: ignore[method-assign]
GradientReducer.wait = _wait_for_sums  # type: ignore[method-assign]
Precision.update_ = _update  # type: ignore[method-assign]


def loss(logits_BK: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each image, for the ranks that continue."""
    _die_if_due("forward")
    return F.cross_entropy(logits_BK, targets, reduction="none")


def lost_before_the_state(*command: str) -> int:
    """A rank that is let in, and gets the signal DIE_BY before it connects to the others."""

    joining.connect_group = _die  # type: ignore[assignment]
    return main(command)
