"""What a checkpoint keeps of the order of sums, and what a run says that continues with another one."""

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from error_texts import naming
from small_run import PLAN, make_parts
from thread_controls import alone

from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable
from bigbatch.comm.gradients.fusion import FusionPlan, PlanSizes, TensorSpec
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.topology import Topology, make_topology
from bigbatch.errors import RunFolderError
from bigbatch.trainer.checkpoint.resume import ResumePoint, find_start
from bigbatch.trainer.checkpoint.saving import CheckpointSaver
from bigbatch.trainer.checkpoint.sums import describe_sums, sums_notes
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.report import output as output_module
from bigbatch.trainer.report.metrics import MetricsLog
from bigbatch.trainer.report.output import RunOutput

TENSORS = [TensorSpec(name, 100, 4, "float32") for name in ("d", "c", "b", "a")]
TABLE = HybridTable((HybridRow(4096, "doubling"), HybridRow(None, "ring")))
OTHER_TABLE = HybridTable((HybridRow(8192, "doubling"), HybridRow(None, "ring")))
SAID = "sums over ranks go another way than in the checkpoint"


def fused(buffer_bytes: int) -> FusionPlan:
    return PlanSizes(1000, buffer_bytes).plan(TENSORS)


def of(
    algorithm: str = "ring",
    *,
    hosts: str = "aabb",
    table: HybridTable | None = None,
    backend: str = "tcp",
    buffer_bytes: int = 800,
    is_sharded: bool = False,
) -> dict[str, str]:
    """The sums of a job of ranks on these hosts."""
    topology: Topology = make_topology(list(hosts), rank=0)
    communicator: Any = SimpleNamespace(
        world_size=len(hosts),
        algorithm=algorithm,
        table=table,
        transport=SimpleNamespace(backend=SimpleNamespace(name=backend)),
        connection=SimpleNamespace(topology=topology),
    )
    return describe_sums(communicator, fused(buffer_bytes), is_sharded=is_sharded)


TABLED = of("hybrid", table=TABLE)


def test_sums_are_described_by_what_decides_their_order() -> None:
    table = hashlib.sha256(b'[[4096, "doubling"], [null, "ring"]]').hexdigest()[:8]
    plan = hashlib.sha256(b'[["d", "c"], ["b", "a"]]').hexdigest()[:8]
    found = of("hybrid", table=TABLE)
    assert found.pop("nodes") == "any", "of doubling and ring"
    assert found == {"ranks": "4", "algorithm": f"hybrid by table {table}", "fusion plan": plan}


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (of(), of("hierarchical"), "algorithm ring, now hierarchical"),
        (of("native"), of("native", backend="gloo"), "algorithm native over tcp, now native over gloo"),
        (of(), of(hosts="a"), "ranks 4, now 1"),
        (of("hierarchical"), of("hierarchical", hosts="aaab"), "nodes 2x2, now 3+1"),
        (of(), of(hosts="abab"), "nodes any, now 2x2 scattered"),  # another ring
        (of(is_sharded=True), of(is_sharded=False), "algorithm reduce-scatter, ring beside over tcp, now ring"),
        (TABLED, of("hybrid", table=OTHER_TABLE), "algorithm"),
        (TABLED, of("hybrid", table=TABLE, buffer_bytes=400), "fusion plan"),
    ],
)
def test_sums_that_go_another_way_are_told_with_what_changed(
    before: dict[str, str], now: dict[str, str], told: str
) -> None:
    (line,) = sums_notes(before, now)
    changed = told if told not in before else f"{told} {before[told]}, now {now[told]}"
    assert line.startswith(f"{SAID} ({changed}): ")
    assert line.endswith("run.reproducible would keep them")
    assert sums_notes(now, before)
    assert not sums_notes(now, now)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, of()),  # nothing to compare
        (of(hosts="a"), of("doubling", hosts="b", buffer_bytes=400)),  # one rank sums nothing
        (of(), of(table=TABLE)),  # a table that no ring goes by
        (of(), of(backend="gloo")),  # the same messages
        (of(), of(hosts="abcd")),  # a ring in the same order
        (of(), of(buffer_bytes=900)),  # sizes that make the same plan
    ],
)
def test_sums_that_go_the_same_way_are_not_told(before: dict[str, str], now: dict[str, str]) -> None:
    assert not sums_notes(before, now)


@pytest.mark.parametrize(
    ("is_reproducible", "sums", "lines"),
    [(False, {"ranks": "2"}, 1), (True, {"ranks": "2"}, 0), (False, {"ranks": "1"}, 0), (False, {}, 0)],
)
def test_sums_of_a_run_that_goes_on_are_told_unless_it_is_reproducible(
    is_reproducible: bool, sums: dict[str, str], lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, f"--run.reproducible={is_reproducible}")
    parts = make_parts()
    output = output_of(config)
    output.open_folder(parts, ResumePoint(sums=sums))
    output.close()
    assert capsys.readouterr().out.count(SAID) == lines


def test_output_names_a_folder_in_place_of_its_files(tmp_path: Path) -> None:
    output = output_of(config_of(tmp_path))
    for name in ("config.yaml", "metrics.jsonl", "summary.json"):
        (tmp_path / name).mkdir()
        with pytest.raises(RunFolderError, match=naming(tmp_path / name)):
            output.open_folder(make_parts(), ResumePoint())
        (tmp_path / name).rmdir()


@pytest.mark.parametrize(
    ("keep", "existing", "first_step", "is_finished", "needed"),
    [
        (1, [], 0, False, 3),
        (1, [1, 2], 2, False, 1),  # those on disk need no more
        (1, [1, 2, 4], 1, False, 2),  # step 4 is set aside: it is not deleted
        (10**6, [], 0, False, 4),  # no more than the steps write
        (1, [], 4, False, 2),
        (1, [], 4, True, 0),
    ],
)
def test_output_asks_for_the_disk_of_checkpoints_that_are_still_to_be_written(
    keep: int, existing: list[int], first_step: int, is_finished: bool, needed: int, tmp_path: Path, monkeypatch: Any
) -> None:
    for step in existing:
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    if is_finished:
        (tmp_path / "summary.json").write_text("{}")
    asked = [0]
    monkeypatch.setattr(output_module, "checkpoint_bytes", lambda *_: 100)
    monkeypatch.setattr(output_module, "require_free_disk", lambda _, *, num_bytes: asked.append(num_bytes))
    output = output_of(config_of(tmp_path, f"--run.keep_checkpoints={keep}"), first_step=first_step)
    output.open_folder(make_parts(), ResumePoint())
    output.close()
    assert asked[-1] == 100 * needed


def test_sums_are_kept_in_checkpoints_and_found_there(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    parts = make_parts()
    saver = CheckpointSaver(config, parts, parts.communicator, owner=None, digests={"samples": None})  # type: ignore[arg-type]
    saver.start(done=0, top1=None, evaluations=[], skipped={})  # later it would lack the optimizer's state
    saved = saver.collect(wait=True)
    assert saved is not None
    control = alone()
    assert find_start(config, RunDir(tmp_path), samples=None, control=control)[0].sums == {"ranks": "1"}


def output_of(config: Any, *, first_step: int = 0) -> RunOutput:
    log = MetricsLog(RunDir(Path(config.run.directory)))
    communicator: Any = make_parts().communicator
    plan = replace(PLAN, first_step=first_step)
    return RunOutput(config, communicator, plan=plan, env=ALONE, ask_to_stop=print, log=log)


def config_of(folder: Path, *options: str) -> Any:
    return load_config(["--config", "quickstart", f"--run.directory={folder}", *options])
