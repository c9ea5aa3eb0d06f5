"""A run's class names: kept in its checkpoints, checked when they are read, compared with the data that follows."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from error_texts import naming

from bigbatch.cli import main
from bigbatch.comm.communicator import Communicator
from bigbatch.errors import CheckpointError, DamagedCheckpoint, UserError
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from bigbatch.trainer.checkpoint.class_names import digest, kept_names, require_same_names, to_keep
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.in_python import train

TEN = list("abcdefghij")
KEYS: dict[str, Any] = {
    "data.image_size": 32,
    "data.loader": "torchvision",
    "data.probe_seconds": 0,
    "model.options.width": 2,
    "batch.global_batch_size": 10,
    "batch.microbatch_size": 10,
    "batch.bn_span": 10,
    "run.epochs": 1,
    "schedule.warmup_epochs": 0,
}


@pytest.mark.parametrize(
    "kept",
    [
        to_keep(["a"]),
        to_keep([*"abcdefghi", "a"]),
        {"names": list(range(10)), "sha256": digest(TEN)},
        {"names": "abcdefghij", "sha256": digest(TEN)},
        {"names": TEN[::-1], "sha256": digest(TEN)},
        torch.zeros(10),
    ],
)
def test_class_names_that_no_run_wrote_are_refused(kept: object) -> None:
    state = {"config": dump_config(load_config(["--config", "quickstart"])), "classes": kept}
    with pytest.raises(DamagedCheckpoint, match=naming("runs/a is damaged", "class names")):
        kept_names(state, source="runs/a")


def test_class_names_first_difference_is_named() -> None:
    for found, difference in (
        ("abd", ("label 2", "'c' there", "'d' here")),
        ("ab", ("label 2", "'c' there", "no class here")),
        ("abcd", ("label 3", "no class there", "'d' here")),
        ("acb", ("label 1", "'b' there", "'c' here")),
    ):
        with pytest.raises(CheckpointError, match=naming("data/x", "runs/a", *difference)):
            require_same_names(tuple("abc"), list(found), source="runs/a", root="data/x", remedy="Do.")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "shapes"
    write_dataset(root, train_per_class=2, val_per_class=1, side_pixels=(40, 50))
    return root


@pytest.fixture(scope="module")
def run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "first"
    train("quickstart", {**KEYS, "data.root": shapes, "run.directory": folder}, quiet=True)
    return folder


def newest(run: Path) -> Path:
    return list_checkpoints(RunDir(run).checkpoints)[-1].path


def renamed(shapes: Path, root: Path) -> Path:
    """The same images; one class has another name, so nearly all have another label."""
    for split in ("train", "val"):
        shutil.copytree(shapes / split, root / split)
        (root / split / "checkerboard").rename(root / split / "z")
    return root


def packed(source: Path, root: Path) -> Path:
    pack(source, root, recipe=PackRecipe())
    return root


def listed(source: Path, root: Path) -> Path:
    """A list whose classes stand in the other order; labels are of sorted names all the same."""
    splits = {
        split: {
            folder.name: [f"{split}/{folder.name}/{image.name}" for image in folder.iterdir()]
            for folder in sorted((source / split).iterdir(), reverse=True)
        }
        for split in ("train", "val")
    }
    root.with_suffix(".json").write_text(json.dumps({"version": 1, "folder": str(source), **splits}))
    return root.with_suffix(".json")


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["evaluate", *map(str, words)])
    return code, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("form", [packed, listed])
def test_class_names_of_any_form_of_the_data_are_compared(
    form: Callable[[Path, Path], Path], run: Path, shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = form(renamed(shapes, tmp_path / "renamed"), tmp_path / "other")
    same = form(shapes, tmp_path / "same")
    kept = load_checkpoint(newest(run))["classes"]
    assert kept == to_keep(sorted(path.name for path in (shapes / "train").iterdir()))
    assert evaluated(capsys, run, f"--data.root={same}") == (0, "")
    code, said = evaluated(capsys, run, f"--data.root={other}")
    difference = naming(other, newest(run), "label 0 is 'checkerboard' there and 'crescent' here")
    assert (code, said.count("\n")) == (1, 1)
    assert re.search(difference, said)
    more = {"data.root": other, "run.epochs": 2}
    for resume in ("auto", newest(run)):
        folder = run if resume == "auto" else tmp_path / "elsewhere"
        said = refusal(lambda: train(run, {**more, "run.directory": folder, "run.resume": resume}, quiet=True))  # noqa: B023
        assert re.search(difference, said)
        assert re.search(naming("model.new_head"), said)


def test_class_names_are_agreed_on_by_all_ranks(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that share no disk may hold the same weights with other names."""
    said: list[str] = []
    monkeypatch.setattr(Communicator, "agree", lambda self, what, text: said.append(f"{what}: {text}"))
    file, state = tmp_path / "state.pt", load_checkpoint(newest(run))
    for names in (TEN, TEN[::-1]):
        torch.save({**state, "classes": to_keep(names)}, file)
        assert main(["evaluate", str(run), "--checkpoint", str(file)]) == 1
    ours, theirs = (each for each in said if each.startswith("the weights to evaluate"))
    assert ours != theirs
    assert ours.split("class names")[0] == theirs.split("class names")[0]


@pytest.mark.slow
def test_class_names_of_weights_bind_the_last_layer_alone(run: Path, shapes: Path, tmp_path: Path) -> None:
    weights = newest(run)
    more = {"data.root": renamed(shapes, tmp_path / "other"), "model.weights": weights}

    def tune(name: str, **keys: object) -> Path:
        train(run, {**more, "run.directory": tmp_path / name, **keys}, quiet=True)
        return tmp_path / name

    for keys in ({}, {"model.partial_weights": ["*"]}, {"model.partial_weights": ["prep.*", "linear.weight"]}):
        said = refusal(lambda: tune("refused", **keys))  # noqa: B023
        assert re.search(naming(f"model.weights={weights}", "label 0 is 'checkerboard'", "model.new_head=true"), said)
    tuned = tune("tuned", **{"model.new_head": True})
    assert load_checkpoint(newest(tuned))["classes"]["names"][-1] == "z"
    tune("partial", **{"model.partial_weights": ["prep.*"]})


@pytest.mark.slow
def test_class_names_are_not_asked_of_older_checkpoints(
    run: Path, shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = load_checkpoint(newest(run))
    del state["classes"]
    old = save_checkpoint(tmp_path / "old", state, step=state["step"], top1=0.5, keep=1)
    other = renamed(shapes, tmp_path / "other")
    code, said = evaluated(capsys, run, "--checkpoint", old, f"--data.root={other}")
    assert (code, said.count("\n")) == (0, 1)
    assert re.search(naming(f"{old} keeps no class names", other), said)
    for name, key in (("resumed", "run.resume"), ("tuned", "model.weights")):
        train(run, {"data.root": other, "run.directory": tmp_path / name, key: old})
        assert capsys.readouterr().out.count("keeps no class names") == 1
