"""An own loss keeps law 1, own metrics keep law 3, and what is wrong with them is said before the first step."""

import json
from pathlib import Path

import pytest

from tests.laws.jobs import (
    NUM_CLASSES,
    ROUNDING,
    SGD,
    VAL_PER_CLASS,
    alone,
    fails,
    forked,
    gradient_distance,
    records,
    run,
    step_gradients,
    train_command,
)

HERE = "tests.laws.own_score"
METRICS = f"{{right: {HERE}.is_right, least: {{name: {HERE}.LeastShare, options: {{num_classes: {NUM_CLASSES}}}}}}}"
OWN = {
    **SGD,
    "run.epochs": 1,
    "schedule.warmup_epochs": 0,
    "optimizer.label_smoothing": 0,
    "optimizer.loss": f"{HERE}.focal",
    "optimizer.loss_options": "{gamma: 2}",
    "run.metrics": METRICS,
}


@pytest.fixture(scope="module")
def two_ranks(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("two_ranks")
    return folder, run(forked(train_command(data, folder, OWN), ranks=2)).stdout


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"augment.mixup_alpha": 0.2}, marks=pytest.mark.long),
        pytest.param(
            {
                "optimizer.loss": "cross_entropy",
                "optimizer.loss_options": f"{{weight: {[*range(1, NUM_CLASSES + 1)]}}}",
                "augment.mixup_alpha": 0.2,
                "optimizer.label_smoothing": 0.1,
            },
            marks=pytest.mark.long,
        ),
    ],
    ids=["indices", "shares", "weights of classes"],
)
def test_own_loss_any_division_gives_the_same_update(
    changes: dict[str, object], data: Path, tmp_path: Path, two_ranks: tuple[Path, str]
) -> None:
    two = two_ranks[0]
    if changes:
        run(forked(train_command(data, two := tmp_path / "two", {**OWN, **changes}), ranks=2))
    run(alone(train_command(data, one := tmp_path / "one", {**OWN, **changes})))
    assert gradient_distance(step_gradients(two), step_gradients(one)) < ROUNDING


@pytest.mark.long
def test_own_loss_of_no_focus_is_cross_entropy(data: Path, tmp_path: Path, two_ranks: tuple[Path, str]) -> None:
    plain = {**OWN, "optimizer.loss": "cross_entropy"}
    del plain["optimizer.loss_options"]
    for name, settings in (("none", {**OWN, "optimizer.loss_options": "{gamma: 0}"}), ("plain", plain)):
        run(alone(train_command(data, tmp_path / name, settings)))
    expected = step_gradients(tmp_path / "plain")
    assert gradient_distance(step_gradients(tmp_path / "none"), expected) < ROUNDING
    assert gradient_distance(step_gradients(two_ranks[0]), expected) > 1000 * ROUNDING


def test_own_metrics_count_every_image_once(data: Path, two_ranks: tuple[Path, str]) -> None:
    folder, shown = two_ranks
    (evaluated,) = records(folder, "eval")
    found = evaluated["metrics"]
    assert found["right"] == evaluated["top1"]
    assert found["least"] - 100 * VAL_PER_CLASS in [right / VAL_PER_CLASS for right in range(VAL_PER_CLASS + 1)]
    assert json.loads((folder / "summary.json").read_text())["metrics"] == found
    assert f"  right {found['right']:.4g}  least {found['least']:.4g}  (70 images in " in shown
    for ranks in (1, 3):
        # 3 x 32 for 70 images: the rest are others', and count for nothing
        command = ["evaluate", str(folder), "--trust-code", "--json", f"--data.root={data}"]
        command += ["--batch.microbatch_size=32"]
        done = run(forked(command, ranks=ranks))
        again = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        assert again["metrics"] == {"right": again["top1"], "least": found["least"]}
        assert again["loss"] == pytest.approx(evaluated["loss"], rel=1e-5)


def test_own_loss_that_cannot_be_is_one_line_before_the_first_step(data: Path, tmp_path: Path) -> None:
    settings = {**OWN, "optimizer.loss": f"{HERE}.focul"}
    assert "the nearest is focal" in fails(forked(train_command(data, tmp_path / "run", settings), ranks=2))
    assert not (tmp_path / "run" / "config.yaml").exists()
