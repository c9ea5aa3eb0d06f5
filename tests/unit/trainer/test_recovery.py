"""When a job goes back, and what it checks then."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bigbatch.errors import NotFinite, ReplicasDiffer, TrainingDiverged, add_note, notes_of
from bigbatch.trainer import healing
from bigbatch.trainer.build_run import RunStart
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.healing import InPlace
from bigbatch.trainer.recovery import Restart

DIVERGED = "the loss is nan since step 8: lower it"


def loop_of(*, ranks: int = 2, skips_overflow: bool = False) -> Any:
    parts = SimpleNamespace(
        communicator=SimpleNamespace(world_size=ranks), precision=SimpleNamespace(skips_overflow=skips_overflow)
    )
    return SimpleNamespace(parts=parts, done=9, plan=SimpleNamespace(first_step=3))


def start_in(folder: Path, *words: str) -> RunStart:
    job: Any = None
    return RunStart(
        config=load_config(["--config", "quickstart", f"--run.directory={folder}", *words]), job=job, log=job
    )


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (NotFinite, {"ranks": 1}),  # no other rank tells
        (NotFinite, {"skips_overflow": True}),  # an overflow is usual in fp16
        (TrainingDiverged, {}),
    ],
)
def test_error_of_the_learning_rate_ends_the_job(
    error: Callable[[str], Exception], options: Any, tmp_path: Path
) -> None:
    raised: Any = error(DIVERGED)
    with pytest.raises(TrainingDiverged, match=DIVERGED):
        Restart(None).accept(raised, start_in(tmp_path), loop_of(**options))  # type: ignore[arg-type]


def test_run_that_is_not_finite_goes_back_once_and_looks_for_the_rank(tmp_path: Path) -> None:
    recovery, start = Restart(None), start_in(tmp_path, "--compute.cuda_graph=true")  # type: ignore[arg-type]
    error = NotFinite(DIVERGED)
    add_note(error, "a note")
    recovery.accept(error, start, loop_of())
    back = recovery.recover(recovery.keep(start, None))
    assert back.check_until == 9
    assert not back.config.compute.cuda_graph, "a replayed step hides its gradients"
    checked = f"{DIVERGED}; going back to step 3, and checking each rank's gradients up to step 9"
    assert back.message == f"{checked}, from here on without a CUDA graph"
    assert replace(back).after(images=None, stop=start.stop or Any).check_until == 0  # type: ignore[arg-type]
    recovery.accept(error, start, loop_of())
    with pytest.raises(NotFinite, match=f"{DIVERGED}; this happened again after the run went back to step 3") as caught:
        recovery.recover(start)
    assert notes_of(caught.value) == ["a note"]


@pytest.mark.parametrize(("state", "until"), [({"step": 6}, 7), ({"step": 7}, 0), (None, 7)])
def test_group_that_loses_a_rank_or_gets_one_checks_the_gradients_that_it_had_to_check(
    state: Any, until: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovery = InPlace(None)  # type: ignore[arg-type]
    monkeypatch.setattr(healing, "_continue", lambda start: replace(start, state=state))
    recovery._restart.check_until = 7
    assert recovery._continue(start_in(Path())).check_until == until


def test_run_whose_weights_differ_goes_back_without_that_check(tmp_path: Path) -> None:
    recovery, start = Restart(None), start_in(tmp_path)  # type: ignore[arg-type]
    recovery.accept(ReplicasDiffer("rank 1 differs"), start, loop_of())
    assert recovery.recover(start).check_until == 0
    checked = ReplicasDiffer("rank 1 computed nan")
    checked.check_until = 7  # by a check that a newer checkpoint interrupts
    recovery = Restart(None)  # type: ignore[arg-type]
    recovery.accept(checked, start, loop_of())
    assert recovery.recover(start).check_until == 7
