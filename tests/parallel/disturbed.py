"""`bigbatch` as a rank outside of which something is wrong: FAULT describes it, in JSON. The target of a forked job."""

import fcntl
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Lock
from typing import Any

from forked_ranks import bigbatch as play_rank

from bigbatch import boot
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.trainer.folder import owner

HOURS = 600.0


def cut_message(*, at: int, share: float, then: str) -> None:
    """In message number `at`, to the store or to another rank, send only this share of it; then be silent.

    then: stop (SIGSTOP), sleep (this thread alone), or close (of this connection).
    """
    lock, sent = Lock(), [0]

    def cutting(send: Callable[..., Any]) -> Callable[..., Any]:
        def cut(stream: socket.socket, data: Any, *others: Any) -> Any:
            with lock:
                sent[0] += 1
                is_due = sent[0] == at
            if not is_due:
                return send(stream, data, *others)
            whole = b"".join(data) if isinstance(data, list) else bytes(data)
            socket.socket.send(stream, whole[: int(share * len(whole))])
            if then == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif then == "sleep":
                time.sleep(HOURS)
            stream.shutdown(socket.SHUT_RDWR)
            return send(stream, data, *others)

        return cut

    for name in ("sendall", "sendmsg"):
        setattr(socket.socket, name, cutting(getattr(socket.socket, name)))


def jump_clock(*, seed: int) -> None:
    """Let the system time jump forwards or backwards, by up to a century, at random moments."""
    draw, read, offset, until = random.Random(seed), time.time, [0.0], [0.0]

    def now() -> float:
        if time.monotonic() > until[0]:
            until[0] = time.monotonic() + draw.uniform(0.05, 1.0)
            offset[0] = draw.choice((-1, 1)) * 10 ** draw.uniform(0, 9.4)
        return max(0.0, read() + offset[0])

    time.time = now


def share_folder(*, seed: int, host: str, stopped: tuple[float, float] | None) -> None:
    """Be another host of a network file system: no process of others is seen, and locks exclude nothing.

    stopped: after how many seconds this process is stopped, and for how long.
    """
    draw = random.Random(f"{seed} {host}")
    socket.gethostname = lambda: host
    boot.own_kernel = owner.own_kernel = lambda: host
    fcntl.flock = lambda *_: None
    owner.BEAT_SECONDS, owner.PATIENCE_SECONDS, owner.STALE_SECONDS, owner.LOOK_SECONDS = 0.2, 1.5, 2.0, 0.1

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            time.sleep(draw.choice((0, 0, 0.01, 0.1)))
            return call(*arguments, **options)

        return called

    for name in ("link", "listdir", "unlink", "replace"):
        setattr(os, name, late(getattr(os, name)))
    if stopped:
        after, seconds = stopped
        pid = os.getpid()
        if os.fork() == 0:
            with suppress(ProcessLookupError):  # it has ended
                time.sleep(after)
                os.kill(pid, signal.SIGSTOP)
                time.sleep(seconds)
                os.kill(pid, signal.SIGCONT)
            os._exit(0)


KINDS = {each.__name__: each for each in (cut_message, jump_clock, share_folder)}


def is_here(fault: Mapping[str, Any]) -> bool:
    """Return whether the fault is of this process: of any rank, or of one, at its first or its second start."""
    rank, joins = fault["rank"], fault.get("joins", False)
    return rank is None or (rank == int(os.environ.get("RANK", "0")) and joins == ("BIGBATCH_JOINS" in os.environ))


def bigbatch(*command: str) -> int:
    """Run the command at a pace of PACE seconds a step; with NCCL=1 the ranks sum over NCCL, which gloo plays."""
    begin = GradientReducer.zero_grad

    def begin_late(reducer: GradientReducer) -> None:
        time.sleep(float(os.environ.get("PACE", "0")))
        begin(reducer)

    GradientReducer.zero_grad = begin_late  # type: ignore[method-assign]
    fault = json.loads(os.environ["FAULT"])
    if is_here(fault):
        KINDS[fault["kind"]](**fault["options"])
    if "NCCL" not in os.environ:
        return play_rank(*command)
    from tests.parallel.nccl_by_gloo import bigbatch as play_nccl

    return play_nccl(*command, "--comm.algorithm=native")
