"""What a sweep's file may not say, and what is refused before anything starts."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from error_texts import naming
from small_sweep import SWEEP, write

from bigbatch.cli import main
from bigbatch.errors import ConfigError
from bigbatch.experiments import sweep
from bigbatch.experiments.engine.plan import read_plan

BATCH, SIZE = "batch.global_batch_size", "batch.microbatch_size"
OPTIONS = SWEEP["options"]
OTHERS = {key: value for key, value in OPTIONS.items() if key not in (BATCH, SIZE)}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"nam": "x"}, "top level: unknown key nam; the nearest legal one is name"),
        ({"name": "a b; rm -rf $HOME"}, "name 'a b; rm -rf $HOME' must be letters, digits and . _ + @ -"),
        ({"where": "cloud"}, "where: 'cloud' must be one of 'local', 'mpirun', 'torchrun', 'emulated', 'slurm'"),
        ({"steps": 0}, "steps: 0 must be a number from 1 on"),
        ({"steps": "ten"}, "steps: 'ten' must be int or null"),
        ({"timeout_minutes": 0}, "timeout_minutes: 0 must be above 0"),
        ({"grid": {"ranks": [1, "2"]}}, "grid: ranks '2' must be numbers"),
        ({"grid": {"ranks": [1], "scaling": ["big"]}}, "grid: scaling 'big' must be one of weak, strong"),
        (
            {"grid": {"ranks": [1], "comm.algoritm": ["ring"]}},
            "unknown key comm.algoritm; the nearest legal one is comm",
        ),
        ({"grid": {"ranks": [1], "run.seed": []}}, "grid: run.seed: [] must be a list of values"),
        ({"ranks": 2}, "ranks: 2 and the ranks of grid: keep one"),
        ({"ranks": 1, "grid": {}, "cases": {"a": {"ranks": 1}, "b": {"ranks": 2}}}, "the ranks of all cases: keep one"),
        (
            {"steps": None, "epochs": 2, "grid": {"run.epochs": [2, 3]}},
            "epochs: 2 and the run.epochs of grid: keep one",
        ),
        ({"seeds": 2, "grid": {"run.seed": [0, 5]}}, "seeds: 2 and the run.seed of grid: keep one"),
        (
            {"grid": {"model.options.width": [8], "model.options": [{"width": 4}]}},
            "grid: model.options and model.options.width: keep one",
        ),
        ({"grid": {"ranks": [1, 1]}}, "grid: ranks states a value twice"),
        ({"launch": {"array": "0-3"}}, "launch, of local: unknown key array"),
        (
            {"where": "slurm", "inference": {"plain": []}},
            "where: slurm and inference: this host would evaluate the runs: remove one of the two",
        ),
        ({"where": "emulated", "launch": {"partition": "gpu"}}, "launch, of emulated: unknown key partition"),
        ({"where": "emulated", "launch": {"link": None}}, "link: None"),
        ({"where": "mpirun", "launch": {"env": {"A": "b"}}}, "env: {'A': 'b'}"),
        ({"timeout_minutes": 10**9}, "timeout_minutes: 1e+09"),
        ({"seeds": 10**9}, "6,000,000,000 points (combinations times seeds) are more than 10,000"),
        # keys that would be ignored, or misread
        ({"options": OPTIONS | {"run.directory": "x"}}, "remove run.directory; the sweep sets it"),
        ({"options": OPTIONS | {"run.epochs": 3}}, "remove run.epochs; steps sets it"),
        ({"grid": SWEEP["grid"] | {BATCH: [96, 192]}, "options": OTHERS}, f"{BATCH} follows from the ranks"),
        ({"grid": {"ranks": [1], SIZE: [8, 16]}}, f"{SIZE} is in both options and grid"),
        *(({"options": OTHERS, "grid": {"ranks": [1], SIZE: [value]}}, f"{SIZE}=") for value in (0, "64")),
        ({"grid": {"ranks": [1], "run.seed": [True]}}, "run.seed="),
    ],
)
def test_sweep_file_that_is_wrong_is_refused_in_a_line(
    changes: dict[str, Any], complaint: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The catalogue of this room's messages: elsewhere only what they name is asked."""
    write(file, **changes)
    assert main(["sweep", str(file)]) == 1
    error = capsys.readouterr().err
    assert f"bigbatch: {file}: " in error
    assert complaint in error
    assert error.count("\n") == 1
    assert main(["sweep", str(file), "--dry-run"]) == 1
    assert not (file.parent / "runs").exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ("keys", "scaling.yaml")),
        ("name: [", ("YAML", "line 1, column 8")),
        ("name: a\nname: b\n", ("YAML", "name", "twice")),
        ("name: a\n", ("config is missing",)),
        ("config: a\nrepeats: 2\n", ("unknown key repeats",)),
    ],
)
def test_sweep_file_that_is_none_is_refused(text: str, named: tuple[str, ...], file: Path) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=naming(file, *named)):
        read_plan(file)
    with pytest.raises(ConfigError, match=naming(file.with_name("none.yaml"), "No such file")):
        read_plan(file.with_name("none.yaml"))


def test_sweep_file_is_refused_for_all_of_its_mistakes_at_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"run.epoch": 3, "optimizer.momentum": 2}
    write(file, options=wrong, cases={"a": {"ranks": 0}, "b": 3}, grid={"lr": [1]}, seeds=0, launch={"gpu": 1})
    assert main(["sweep", str(file)]) == 1
    error = capsys.readouterr().err.splitlines()
    named = (
        "run.epochs",
        "optimizer.momentum=2",
        "ranks 0",
        "cases: b",
        "schedule.base_lr",
        "seeds: 0",
        "unknown key gpu",
    )
    for each in named:
        assert any(each in line for line in error), each
    assert len(error) == len(named)
    assert all(str(file) in line for line in error)


@pytest.mark.slow
def test_sweep_points_that_are_impossible_are_all_told_before_anything_starts(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spanned = {key: value for key, value in OPTIONS.items() if key != "batch.bn_span"}
    write(file, grid={"ranks": [1, 5, 6], "batch.bn_span": [16, 32]}, options=spanned)
    assert main(["sweep", str(file)]) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith("bigbatch: 2 of 6 points")
    assert re.match(r"  point 2 \(ranks=5, batch\.bn_span=16\) and 1 more: 5 ranks .*\b2\b.* ranks_per_node", error[1])
    assert len(error) == 2
    assert not (file.parent / "runs").exists()
    write(file, options={"data.loader": "torchvision"})
    assert main(["sweep", str(file)]) == 1
    assert re.search(naming("steps: 10", "data.loader"), capsys.readouterr().err)


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "launch", "folder", "named"),
    [
        ("emulated", {"link": "1gbite"}, "f", ("launch: ", "--link '1gbite'", "1mbit", "100gbit")),
        ("slurm", {"partition": True}, "f", ("launch: ", "--partition", "argument")),
        ("emulated", {"launcher": "torchrun", "place": "cyclic"}, "f", ("launch: ", "--place cyclic", "torchrun")),
        ("slurm", {"gpus_per_node": "many"}, "f", ("launch: ", "--gpus-per-node", "'many'")),
        ("slurm", {}, "my sweep", ("--folder 'my sweep'", "Slurm")),
        ("mpirun", {"hosts": "a:2,b:1"}, "f", ("launch: ", "--ranks 4", "3", "--hosts")),
        ("local", {"interface": "eth0 eth1"}, "f", ("launch: ", "--interface 'eth0 eth1'")),
    ],
)
def test_sweep_launch_options_are_checked_before_the_first_point_starts(
    where: str,
    launch: dict[str, Any],
    folder: str,
    named: tuple[str, ...],
    file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(file, where=where, launch=launch, grid={"ranks": [4]})
    for more in (["--dry-run"], []):
        assert main(["sweep", str(file), "--folder", folder, *more]) == 1
        told = capsys.readouterr()
        assert told.err.startswith(f"bigbatch: {named[0]}")
        assert re.search(naming(*named), told.err)
        assert told.err.count("\n") == 1
        assert told.out == ""
    assert os.listdir(file.parent) == ["sweep.yaml"]


@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_sweep_checks_the_emulators_folder_before_the_first_point_starts(
    more: list[str], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = file.parent / "runtime"
    (runtime / "bigbatch-emulate").mkdir(parents=True)
    (runtime / "bigbatch-emulate").chmod(0o755)  # others can reach it
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(sweep, "run_points", None)
    write(file, where="emulated", grid={"ranks": [4]})
    assert main(["sweep", str(file), "--folder", "f", *more]) == 1
    told = capsys.readouterr()
    assert re.search(naming(runtime / "bigbatch-emulate", "chmod 700"), told.err)
    assert (told.err.count("\n"), told.out) == (1, "")
    assert not (file.parent / "f").exists()


@pytest.mark.long
@pytest.mark.parametrize("points", ["9", "3-1", "0-99999999999", "x", ""])
def test_sweep_points_that_are_not_there(points: str, file: Path) -> None:
    assert main(["sweep", str(file), f"--only={points}", "--dry-run"]) == 1


def test_sweep_points_are_compared_with_their_images_before_anything_starts(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each point as its run would be; a data set of another machine is only reported by --dry-run."""
    others: dict[str, Any] = {"steps": None, "epochs": 1, "grid": {BATCH: [96, 192]}}
    write(file, options=OTHERS | {SIZE: 32, "data.num_synthetic_samples": 100}, **others)
    for more in ([], ["--dry-run"]):
        assert main(["sweep", str(file), *more]) == 1
        first, reason = capsys.readouterr().err.splitlines()
        assert "1 of 2 points cannot be trained:" in first
        assert re.search(naming("point 1 ", f"{BATCH}=192 exceeds the 100 training images"), reason)
    root = tmp_path / "none"
    write(file, options=OTHERS | {SIZE: 32, "data.loader": "torchvision", "data.root": str(root)}, **others)
    assert main(["sweep", str(file), "--dry-run"]) == 0
    assert f"data.root={root} is not on this host" in capsys.readouterr().err
    assert main(["sweep", str(file)]) == 1
    assert "2 of 2 points cannot be trained:" in capsys.readouterr().err
    files: dict[str, Any] = {"model.weights": str(root), "comm.table": str(root)}
    options = OTHERS | {SIZE: 32, "data.num_synthetic_samples": 100, BATCH: 96}
    write(file, options=options, **{**others, "grid": {key: [None, name] for key, name in files.items()}})
    assert main(["sweep", str(file), "--dry-run"]) == 0
    told = capsys.readouterr().err
    assert all(f"{key}={root} is not on this host" in told for key in files)
    assert main(["sweep", str(file)]) == 1
    assert "3 of 4 points cannot be trained:" in capsys.readouterr().err
    write(file, options=options, **{**others, "grid": {"model.weights": ["timm:resnet50"]}})
    assert main(["sweep", str(file), "--dry-run"]) == 0
    assert "not on this host" not in capsys.readouterr().err
