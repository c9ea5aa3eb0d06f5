"""`bigbatch replay` computes any step of a run again in one process, with the same bits, and finds a flipped one."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bigbatch.errors import UserError
from bigbatch.tools.replay.replay import main
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.step.signals import STOP_SIGNALS
from tests.laws.jobs import Forked, alone, forked, run, train_command

RECORDED: dict[str, object] = {
    "run.digest_every_steps": 1,
    "run.digest_layers": "[linear]",
    "run.checkpoint_every_steps": 4,
    "run.keep_checkpoints": 9,
    "data.loader": "torchvision",
}
"""Two epochs of five steps of four microbatches, with checkpoints of steps 4, 8 and 10."""


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """A replay sets up this process as a training does."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.set_num_threads(before[1])


@pytest.fixture(scope="module")
def faulty(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks; the second one flips a bit in the last microbatch of step 7."""
    folder = tmp_path_factory.mktemp("replay") / "faulty"
    command = train_command(data, folder, {**RECORDED, "run.reproducible": "true"})
    run(Forked(("14", "1", *command), ranks=2, target="tests.laws.ranks_miscompute:main"))
    return folder


def replay(folder: Path, step: int, capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    code = main([str(folder), "--step", str(step), *overrides])
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers, "a replay ends as any process does"
    return code, capsys.readouterr().out.splitlines()


def refusal(folder: Path, step: int) -> str:
    with pytest.raises(UserError) as refused:
        main([str(folder), "--step", str(step)])
    return str(refused.value)


def test_replay_names_rank_microbatch_and_tensor_of_a_flipped_bit(
    faulty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in faulty.rglob("*")}
    code, (where, cause) = replay(faulty, 7, capsys)
    assert code == 5
    assert where == (
        "step 7: images, activations are equal; 1 of 25 gradients before the sum differ, first that of linear.weight; "
        "in microbatch 3 (of 0 to 3), computed by rank 1"
    )
    assert cause.startswith("likely cause: rank 1 computes other values from the same images: a bit that flipped")
    for step, start in ((2, "the start of the run"), (10, "the checkpoint of step 8")):
        assert replay(faulty, step, capsys) == (
            0,
            [
                f"step {step}: images, activations, gradients before the sum, gradients, weights and state are equal, "
                f"of 4 microbatches on 2 ranks, computed again from {start}"
            ],
        )
    assert {path: path.stat().st_mtime_ns for path in faulty.rglob("*")} == before, "nothing is written"


@pytest.mark.long
def test_replay_of_a_model_whose_forward_changes_its_buffers(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"model.name": "tests.laws.foreign_models.WithComputedWeights", "model.options": "{how: spectral_norm}"}
    run(alone(train_command(data, tmp_path, {**RECORDED, **model, "run.digest_layers": "[head]"})))
    assert replay(tmp_path, 3, capsys, "--trust-code")[0] == 0


@pytest.mark.parametrize(
    ("ranks", "step", "settings"),
    [
        # the order of the sums is that of one process
        pytest.param(1, 7, {"run.reproducible": "false", "optimizer.precision": "bf16"}, marks=pytest.mark.long),
        pytest.param(4, 3, {"optimizer.sharded": "true"}, marks=pytest.mark.long),
        pytest.param(2, 9, {"batch.virtual_ranks": 4, "augment.mixup_alpha": 0.2}, marks=pytest.mark.long),
    ],
)
def test_replay_equals_a_run_of_any_number_of_ranks(
    ranks: int, step: int, settings: dict[str, object], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(forked(train_command(data, tmp_path, {**RECORDED, "run.reproducible": "true", **settings}), ranks=ranks))
    code, lines = replay(tmp_path, step, capsys)
    assert (code, len(lines)) == (0, 1), lines
    assert f"of 4 microbatches on {ranks} rank" in lines[0]


@pytest.mark.long
def test_replay_of_rounded_sums_is_of_the_step_after_a_checkpoint(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(forked(train_command(data, tmp_path, RECORDED), ranks=2))
    code, (line,) = replay(tmp_path, 5, capsys)
    assert code == 0
    assert line.startswith("step 5: images, activations, gradients before the sum are equal, of 4 microbatches on 2 ")
    assert refusal(tmp_path, 7).endswith(
        "only the step after a checkpoint can be replayed, and the newest one before step 7 is of step 4"
    )


def test_replay_refuses_in_one_line_what_it_cannot_compare(faulty: Path, tmp_path: Path) -> None:
    assert refusal(faulty, 11).endswith("has no digests of step 11: the nearest step that it recorded is 10")
    assert refusal(tmp_path / "none", 1).endswith("name a run folder")
    copy = RunDir(Path(shutil.copytree(faulty, tmp_path / "copy")))
    text = copy.config.read_text()
    rounded = text.replace("reproducible: true", "reproducible: false")
    for old, new, words in (
        ("bn_span: 8", "bn_span: 16", "ghost batches on several ranks (batch.bn_span=16)"),
        ("microbatch_size: 8", "microbatch_size: 16", "its config now gives another number: set --batch"),
        ("loader: torchvision", "loader: torchvision\n  no_such_key: 1", "no_such_key"),  # of a later release
    ):
        assert rounded.count(old) == 1
        copy.config.write_text(rounded.replace(old, new))
        assert words in refusal(copy.path, 5)
    copy.config.write_text(rounded)
    assert "trained without run.reproducible" in refusal(copy.path, 7)
    copy.config.write_text(text)
    moved = json.dumps(str(tmp_path / "moved"))
    with pytest.raises(UserError, match="moved"):
        main([str(copy.path), "--step", "5", f"--data.root={moved}"])
    shutil.rmtree(copy.checkpoints)
    records = [json.loads(line) for line in copy.metrics.read_text().splitlines()]
    for record in records:
        if record["kind"] == "start":
            record["step"] = 2
    copy.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "before step 5, and began at step 2 with a checkpoint of another run" in refusal(copy.path, 5)
    copy.metrics.write_text("")
    assert refusal(copy.path, 5).endswith("has no digests to compare with: train with --run.digest_every_steps 1")


def test_replay_tells_what_else_differs_from_the_runs_machine(
    faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = RunDir(Path(shutil.copytree(faulty, tmp_path / "copy")))
    copy.metrics.write_text(copy.metrics.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "2.10.0"'))
    code, lines = replay(copy.path, 7, capsys)
    assert code == 5
    assert lines[0] == f"job: torch is 2.10.0 in {copy.path}, {torch.__version__} here"
    assert lines[-1].endswith("the differences are listed above: torch")


@pytest.mark.long
def test_replay_tells_of_keys_that_a_later_start_changed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = train_command(data, tmp_path, {**RECORDED, "run.reproducible": "true", "run.epochs": 1})
    run(alone(command))
    run(forked([*command, "--run.epochs=2", "--schedule.base_lr=0.2"], ranks=2))
    assert replay(tmp_path, 6, capsys)[0] == 0
    code, lines = replay(tmp_path, 5, capsys)  # whose rate was that of another schedule
    assert code == 5
    assert lines[:2] == ["config: run.epochs=2 (was 1)", "config: schedule.base_lr=0.2 (was 8.0)"]
    assert "weights and state differ, first " in lines[2]
    assert lines[3].endswith("the differences are listed above: run.epochs, schedule.base_lr")
