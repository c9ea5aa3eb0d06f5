"""The run that follows a loss in the same process, without other ranks."""

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from thread_controls import alone
from thread_groups import groups_of
from tiny_training import TINY_OPTIONS
from torch import Tensor, nn

from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.exit_record import BEGUN
from bigbatch.errors import FAILED, LOST, PeerLostError, ReplicasDiffer, RunFolderError
from bigbatch.trainer import healing
from bigbatch.trainer import run as training
from bigbatch.trainer.build import parts as build_parts
from bigbatch.trainer.build_run import JobRank, RunStart, build_run
from bigbatch.trainer.checkpoint.saving import copy_to_host
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder import ownership
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.folder.owner import newest_number, own_claim, take, take_over
from bigbatch.trainer.healing import why_not_healing
from bigbatch.trainer.observe.hooks import HooksObserver, TrainingHooks
from bigbatch.trainer.report.metrics import MetricsLog
from bigbatch.trainer.run import Training, TrainingRun
from bigbatch.trainer.step.stop_request import StopRequest
from bigbatch.trainer.step.window import Totals
from bigbatch.trainer.train import join, run_training
from tests.laws.jobs import assert_identical, records

IN_PLACE = ("--run.heal=in_place",)


def job_of(world_size: int) -> Any:
    """A job that can heal."""
    connection = SimpleNamespace(endpoints=(), control=alone())
    communicator = SimpleNamespace(connection=connection, world_size=world_size, device=torch.device("cpu"), rank=0)
    return SimpleNamespace(communicator=communicator, env=SimpleNamespace(joins=False))


done: list[str] = []


class Run:
    """A run that loses a rank, and its successor, which records what asked it to stop."""

    def __init__(self, start: RunStart) -> None:
        self._kept = start.state
        self.splits = SimpleNamespace(images=None)
        self.loop = SimpleNamespace(
            copy_state=lambda: {"step": 3},
            stop=start.stop or StopRequest(),
            parts=SimpleNamespace(),
            plan=SimpleNamespace(first_step=3),
            totals=Totals(),
        )
        done.append("made")

    def run(self, *, wants_join: Any) -> Any:
        if self._kept is None:
            raise PeerLostError("rank 1 on n1 was lost")
        return {"asked by": self.loop.stop.signal_name}


def play(monkeypatch: pytest.MonkeyPatch, *, heal: Any, run: Any = Run) -> Training:
    """A job of three ranks whose runs and healing are played."""
    monkeypatch.setattr(healing, "heal", heal)
    stubs = {"build_run": lambda start, **_: start, "TrainingRun": run, "prepare": lambda start, **_: start}
    for name, stub in {**stubs, "Ownership": lambda config: MagicMock(owner=None)}.items():
        monkeypatch.setattr(training, name, stub)
    return Training(load_config(["--config", "quickstart", *IN_PLACE]), job_of(3), is_quiet=True)


def test_run_that_cannot_heal_says_what_prevents_it() -> None:
    config = load_config(["--config", "quickstart"])
    assert "mpi cannot continue without a rank" in why_not_healing(config, "mpi")
    assert "process group of the script's own" in why_not_healing(config, "tcp")
    captured = load_config(["--config", "quickstart", "--compute.cuda_graph", "true"])
    assert "compute.cuda_graph=false can" in why_not_healing(captured, "nccl")
    registered = load_config(["--config", "quickstart", "--comm.buffers", "registered"])
    assert "comm.buffers=torch can" in why_not_healing(registered, "nccl")


def test_stop_signal_during_healing_stops_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def heal(start: RunStart, *_: Any, **settings: Any) -> Any:
        done.append("healed")
        os.kill(os.getpid(), signal.SIGINT)
        return replace(start, job=job_of(1), message="lost: rank 1 on n1", since=None)

    done.clear()
    job = play(monkeypatch, heal=heal)
    assert job.train() == {"asked by": "SIGINT"}
    assert done == ["made", "healed", "made"]
    assert job.start.job.communicator.world_size == 1, "by which running out of memory is explained"
    assert job.start.figures.counts == {"rank_loss": 1, "rank_join": 0, "other": 0}
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def start_of(config: Config, job: Any) -> RunStart:
    log = MetricsLog(RunDir(Path(config.run.directory)))
    return RunStart(config=config, job=job, log=log, stop=StopRequest(takes_signals=False))


def test_run_stops_if_the_torchrun_of_its_start_has_ended(tmp_path: Path) -> None:
    """Also if that was killed before the run was built: the rank's parent is another one by then."""
    config = load_config(["--config", "quickstart", *TINY_OPTIONS, f"--run.directory={tmp_path}"])
    with closing((job := join(config, replace(ALONE, master_runs=True, agent_pid=54321))).communicator):
        start = replace(start_of(config, job), stop=None)
        run = TrainingRun(build_run(start, is_quiet=True))
        run.close()
    assert run.loop.stop._launcher == 54321


def test_steps_leave_the_state_in_memory_as_it_was(tmp_path: Path) -> None:
    """The run goes back to it if the ranks' weights differ before the first checkpoint."""
    words = [*TINY_OPTIONS, "--run.epochs", "2", "--run.directory", f"{tmp_path}"]
    config = load_config(["--config", "quickstart", *words])

    def stop(done: int) -> None:
        if done == 2:
            raise ArithmeticError

    def make(kept: Any = None, **hooks: Any) -> TrainingRun:
        start = replace(start_of(config, job), state=kept)
        return TrainingRun(build_run(start, observers=[HooksObserver(TrainingHooks(**hooks))], is_quiet=True))

    job = join(config, ALONE)
    run = make(on_step=stop)
    with closing(job.communicator), pytest.raises(ArithmeticError):
        run.run()
    kept = run.loop.copy_state()
    assert kept is not None
    before = copy_to_host(kept)
    run = make(kept)
    run.run()
    make(run.loop.copy_state()).run()
    assert [each["step"] for each in records(tmp_path, "eval")] == [8], "the last evaluation is recorded once"
    momenta, others = (
        {f"{key}": value["momentum_buffer"] for key, value in state["optimizer"]["state"].items()}
        for state in (kept, before)
    )
    assert_identical(momenta, others)


def test_run_that_goes_back_to_the_state_of_a_healing_does_not_take_over_parts_of_a_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a checkout may hold checkpoints in runs/quickstart
    taken: list[RunStart] = []

    class Differing(Run):
        def __init__(self, start: RunStart) -> None:
            taken.append(start)
            super().__init__(start)

        def run(self, **settings: Any) -> Any:
            if len(taken) == 2:
                raise ReplicasDiffer("rank 1 differs")
            return super().run(**settings)

    def heal(start: RunStart, *_: Any, **settings: Any) -> Any:
        return replace(start, job=job_of(2), message="lost: rank 1 on n1", since=None)

    play(monkeypatch, heal=heal, run=Differing).train()
    assert [each.state for each in taken] == [None, {"step": 3}, {"step": 3}]
    assert [each.parts is not None for each in taken] == [False, True, False]
    assert [each.is_in_parts for each in taken] == [False, True, False]


ALL_HOOKS = {
    "run.epochs": 2,
    "run.reproducible": True,
    "run.digest_every_steps": 1,
    "run.noise_scale_every_steps": 1,
    "optimizer.precision": "fp16",
    "optimizer.loss_scale": 2.0**12,
    "optimizer.ema_decay": 0.9,
    "optimizer.ema_every_steps": 1,
}


def held(model: nn.Module) -> Counter[str]:
    """Hooks of a model, and tensors and reducers of this process."""
    gc.collect()
    found = Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, Tensor | GradientReducer))
    found["hooks of modules"] = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    for p in model.parameters():
        found["hooks"] += len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ())
    return found


@pytest.mark.parametrize("is_reproducible", [True, pytest.param(False, marks=pytest.mark.long)])
def test_runs_after_losses_keep_the_model_and_no_hook_of_the_steps_that_did_not_end(
    is_reproducible: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is lost in three steps, in which audits, digests, noise, wide accumulation and the reducer have hooks."""
    calls, losses, wait = 0, {3, 5, 8}, GradientReducer.wait

    def lose(reducer: GradientReducer) -> None:
        nonlocal calls
        calls += 1
        if calls in losses:
            raise PeerLostError("rank 1 on n1 was lost")
        wait(reducer)

    def make(folder: str, **taken: Any) -> TrainingRun:
        options = ALL_HOOKS | {"run.directory": tmp_path / folder, "run.reproducible": is_reproducible}
        options |= {"run.audit_every_steps": 1} if is_reproducible else {}
        words = [*TINY_OPTIONS, *(f"--{key}={value}" for key, value in options.items())]
        config = load_config(["--config", "quickstart", *words])
        return TrainingRun(build_run(replace(start_of(config, job), **taken), is_quiet=True))

    config = load_config(["--config", "quickstart", *TINY_OPTIONS])
    with closing((job := join(config, ALONE)).communicator):
        undisturbed = make("undisturbed")
        undisturbed.run()
        expected = undisturbed.loop.copy_state()
        monkeypatch.setattr(GradientReducer, "wait", lose)
        run, kept = make("healed"), list[Counter[str]]()
        model, optimizer = run.parts.model, run.parts.optimizer
        for _ in losses:
            with pytest.raises(PeerLostError):
                run.run()
            taken = {"state": run.loop.copy_state(), "parts": run.parts, "is_in_parts": True}
            with monkeypatch.context() as patch:
                patch.setattr(build_parts, "_divide_work_", MagicMock(side_effect=PeerLostError("lost again")))
                with pytest.raises(PeerLostError):
                    make("healed", **taken)
            run = make("healed", **taken)
            taken.clear()
            kept.append(held(model))
        run.run()
    assert (run.parts.model, run.parts.optimizer) == (model, optimizer)
    assert all(each <= kept[0] for each in kept)
    found = run.loop.copy_state()
    assert found
    assert expected
    assert_identical(found["model"], expected["model"])
    assert_identical(found["average"], expected["average"])
    assert found["precision"] == expected["precision"]
    assert [each["step"] for each in records(tmp_path / "healed", "digests")] == list(range(1, 9))


def test_first_rank_whose_claim_reached_no_other_claims_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(work: Callable[[], str], control: Any, **settings: Any) -> str:
        number = work()
        if number == "2":
            raise PeerLostError("rank 1 on n1 was lost, which held the store")
        return number

    monkeypatch.setattr(ownership, "write_on_first", tell)
    control: Any = SimpleNamespace(rank=0, master=None)
    config = load_config(["--config", "quickstart", "--run.directory", f"{tmp_path}"])
    with ownership.Ownership(config) as held:
        held.take(control)
        with pytest.raises(PeerLostError):
            held.take_over(control)
        held.take_over(control)
    assert held.number == 3


def wake(folder: Path, record: Path, *, number: int, is_over: bool) -> None:
    """Heal as rank 1 of 2, after the owner of this number has ended, and rank 0's process with it."""
    config = load_config(["--config", "quickstart", *IN_PLACE, f"--run.directory={folder}"])
    _, (group,) = groups_of(2, ended={0}, ranks=[1])
    group = replace(group, env=replace(group.env, stopped_file=record))
    with ownership.Ownership(config) as held:
        owner = take(folder, own_claim())
        held.number = owner.number
        if number == 2:
            owner.release()
            owner = take_over(folder, number=1)
        owner.release(has_failed=not is_over)
        communicator: Any = SimpleNamespace(connection=group, device=torch.device("cpu"))
        error = PeerLostError("rank 0 on here was lost")
        error.lost_ranks = frozenset({0})
        start = start_of(config, JobRank(communicator, group.env, None, None))
        healing.heal(start, error, ownership=held).job.communicator.close()


@pytest.mark.parametrize("number", [1, 2])
def test_rank_that_wakes_after_the_end_of_its_job_changes_nothing(number: int, tmp_path: Path) -> None:
    """mpirun wakes stopped ranks when it ends. The others have finished, with the first owner or with another one."""
    (record := tmp_path / "record").write_text("0")
    with pytest.raises(PeerLostError, match="has ended without this process") as caught:
        wake(tmp_path / "run", record, number=number, is_over=True)
    assert (record.read_text(), newest_number(tmp_path / "run"), caught.value.exit_code) == ("0", number, 0)


def test_rank_whose_first_rank_failed_goes_on_and_records_that(tmp_path: Path) -> None:
    (record := tmp_path / "record").write_text("6")
    wake(tmp_path / "run", record, number=1, is_over=False)
    assert (record.read_text(), newest_number(tmp_path / "run")) == (f"{BEGUN} 1", 2)


def test_rank_that_may_not_own_the_run_folder_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks have taken the folder over, and continue."""
    (record := tmp_path / "record").write_text(BEGUN)
    monkeypatch.setattr(ownership.Ownership, "take_over", MagicMock(side_effect=RunFolderError("another owner")))
    with pytest.raises(RunFolderError):
        wake(tmp_path / "run", record, number=1, is_over=False)
    assert record.read_text() == BEGUN


@pytest.mark.parametrize(("heals", "code", "is_lost"), [(True, LOST, False), (True, FAILED, True), (False, LOST, True)])
def test_job_that_heals_ends_well_without_a_rank_that_is_lost_after_the_run(
    heals: bool, code: int, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = PeerLostError("rank 1 on n1 was lost in the last barrier")
    error.exit_code = code
    job = job_of(2)
    job.communicator.connection.endpoints = () if heals else None
    job.communicator.connection.close = MagicMock(side_effect=error)
    monkeypatch.setattr(Training, "train", lambda self: {"top1": 0.5})
    with pytest.raises(PeerLostError) if is_lost else nullcontext():
        assert run_training(load_config(["--config", "quickstart"]), job) == {"top1": 0.5}
