"""Requests to stop a run: which signals count, from which source, and the line that acknowledges them at once."""

import os
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import enumerate as enumerate_threads

import pytest
from thread_controls import alone

from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import PeerLostError
from bigbatch.trainer.step import stop_request
from bigbatch.trainer.step.stop_request import Joining, Stopped, StopRequest, leave_stopped

ASKING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")


@pytest.fixture
def stop() -> StopRequest:
    return StopRequest()


Said = SimpleQueue[str]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """What acknowledges a request; the listener looks often."""
    monkeypatch.setattr(stop_request, "LOOK_SECONDS", 0.01)
    return SimpleQueue()


def test_signals_let_a_second_ctrl_c_interrupt_at_once(stop: StopRequest) -> None:
    assert not stop.is_set
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.is_set
    assert stop.signal_name == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def wait_until_told(stop: StopRequest) -> None:
    """Until the listener has written down how far the main thread is: from then on the next boundary is the one."""
    departure, deadline = stop._departure, time.monotonic() + 200
    while not departure._has_told:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("number", [signal.Signals[name] for name in ASKING])
def test_stop_is_acknowledged_and_due_at_the_next_boundary(number: signal.Signals, said: Said) -> None:
    signal.signal(number, signal.SIG_DFL)  # nohup leaves SIGHUP ignored
    stop = StopRequest()
    with stop.watch(alone(), acknowledge=said.put):
        assert not stop.is_due()
        os.kill(os.getpid(), number)
        assert said.get(timeout=200) == number.name
        wait_until_told(stop)
        assert stop.is_due()
        with pytest.raises(Stopped):
            stop.leave_if_due()
    assert said.empty()
    assert signal.set_wakeup_fd(-1) == -1, "nothing listens any more"


def test_stop_does_not_take_a_closed_terminal_from_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.is_set
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_stop_of_another_rank_is_acknowledged(stop: StopRequest, said: Said) -> None:
    with stop.watch(alone(), acknowledge=said.put):
        stop._departure.ask()
        assert said.get(timeout=200) == stop.asked_by == "another rank's signal"
        assert stop.is_due()
    assert not stop.is_set


def test_ranks_that_want_to_join_end_the_run_at_a_boundary_and_nothing_says_that_it_stops(
    stop: StopRequest, said: Said
) -> None:
    with stop.watch(alone(), acknowledge=said.put, wants_join=lambda: True):
        assert stop.joining is None
        wait_until_told(stop)
        assert stop.is_due()
        assert stop.joining
        with pytest.raises(Joining):
            stop.leave_if_due()
    assert said.empty()


def test_stop_is_heeded_although_no_look_for_ranks_that_join_succeeds(stop: StopRequest, said: Said) -> None:
    looked: SimpleQueue[str] = SimpleQueue()

    def fail() -> None:
        looked.put("looked")
        raise OSError("no such data set any more")

    with stop.watch(alone(), acknowledge=said.put, wants_join=fail):
        looked.get(timeout=200)
        os.kill(os.getpid(), signal.SIGTERM)
        assert said.get(timeout=200) == "SIGTERM"


def test_stop_is_not_acknowledged_where_a_rank_is_lost(stop: StopRequest, said: Said) -> None:
    """mpirun ends all ranks after one was killed, so no checkpoint will be saved."""
    control = alone()
    control.world_size = 2  # the other one writes nothing
    with stop.watch(control, acknowledge=said.put):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until_told(stop)
    assert said.empty()


def test_stop_is_asked_for_by_the_end_of_the_launcher(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torchrun is killed, its ranks would otherwise train on unnoticed."""
    launcher = os.getppid()
    stop = StopRequest(launcher=launcher)
    with stop.watch(alone(), acknowledge=said.put):
        time.sleep(0.05)
        assert said.empty()
        monkeypatch.setattr(os, "getppid", lambda: launcher + 1)
        assert said.get(timeout=200) == "the end of its launcher"
        wait_until_told(stop)
        assert stop.is_due()


def test_stop_that_came_before_it_was_watched_for_is_not_lost(stop: StopRequest, said: Said) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert not stop.is_due(), "not watched, as in bigbatch doctor"
    with stop.watch(alone(), acknowledge=said.put):
        assert said.get(timeout=200) == "SIGTERM"


def test_stop_of_a_forked_process_is_its_own(stop: StopRequest, said: Said) -> None:
    with stop.watch(alone(), acknowledge=said.put):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which this child does not use
            child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.05)
    assert said.empty()


def test_stop_is_agreed_on_even_if_it_cannot_be_announced(stop: StopRequest) -> None:
    def lost(asked_by: str) -> None:
        raise BrokenPipeError

    with stop.watch(alone(), acknowledge=lost):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until_told(stop)
        assert stop.is_due()


def test_stop_signal_after_the_store_is_lost_is_taken_in_silence(
    stop: StopRequest, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def lose(keys: object) -> bool:
        raise PeerLostError("the store does not answer")

    control = alone()
    monkeypatch.setattr(control.store, "check", lose)
    with stop.watch(control, acknowledge=print):
        deadline = time.monotonic() + 200
        while "bigbatch-stop" in {thread.name for thread in enumerate_threads()}:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGTERM"
    assert capfd.readouterr().err == ""


def test_stop_is_listened_for_no_longer_though_a_forked_process_lives_on(stop: StopRequest) -> None:
    with stop.watch(alone(), acknowledge=print), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which this child does not use
        if not (child := os.fork()):
            time.sleep(600)
            os._exit(0)
    names = {thread.name for thread in enumerate_threads()}
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert "bigbatch-stop" not in names


def test_stopped_rank_leaves_its_code_in_the_file_that_its_launcher_made(tmp_path: Path) -> None:
    file = tmp_path / "stopped"
    env = replace(ALONE, stopped_file=file)
    assert leave_stopped(ALONE) == leave_stopped(env) == 130
    assert not file.exists(), "a host that does not see it makes none"
    file.touch()
    assert leave_stopped(env) == 0
    assert file.read_text() == "130"
