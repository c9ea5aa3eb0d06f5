"""Sweeps: what a file may say, which points it makes, and what becomes of them."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from error_texts import naming

from bigbatch.cli import main
from bigbatch.errors import LaunchOptionError, SchedulerError
from bigbatch.interpreter import bigbatch_argv
from bigbatch.launch.launchers import slurm_queue
from bigbatch.launch.sweep import queueing, running
from bigbatch.launch.sweep.complete import packaged_sweeps
from bigbatch.launch.sweep.folder import SweepFolder, prepare, read_state
from bigbatch.launch.sweep.job_log import find_reason, find_times
from bigbatch.launch.sweep.jobs import array_words, arrays, launch_words, point_command
from bigbatch.launch.sweep.plan import dump_sweep, read_sweep
from bigbatch.launch.sweep.points import Point, make_points
from bigbatch.launch.sweep.sessions import processes_in, sessions_under
from bigbatch.launch.sweep.show import print_table
from bigbatch.trainer.config.file import PACKAGED, load_config, read_dumped

SWEEP: dict[str, Any] = {
    "name": "small",
    "config": "quickstart",
    "options": {
        "data.loader": "synthetic",
        "schedule.warmup_epochs": 0,
        "batch.global_batch_size": 96,
        "batch.microbatch_size": 32,
        "batch.bn_span": 16,
    },
    "steps": 10,
    "where": "local",
    "launch": {},
    "ranks_per_node": 2,
    "grid": {"scaling": ["weak", "strong"], "ranks": [1, 2, 4]},
    "repeats": 1,
    "timeout_minutes": 5,
}


def write(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump(SWEEP | changes, sort_keys=False))
    return path


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "sweep.yaml")


# --- which points there are ---


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ({}, {4}),  # 8 cores, at most 2 ranks on a host
        ({"ranks_per_node": 4}, {2}),
        ({"options": SWEEP["options"] | {"compute.cpu_threads": 3}}, {3}),
        ({"grid": {"ranks": [1, 2], "compute.cpu_threads": [1, 5]}}, {1, 5}),
        ({"where": "mpirun", "launch": {"hosts": "a:2,b:2"}}, {None}),  # of other hosts the cores are not known
    ],
)
def test_sweep_points_have_the_same_threads_per_rank(
    file: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], threads: set[int | None]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)
    points = make_points(read_sweep(write(file, **changes)), folder=Path("out"))
    assert {point.config.compute.cpu_threads for point in points} == threads


@pytest.mark.parametrize("cores_of_then", [None, 2])
def test_sweep_goes_on_with_the_threads_it_was_begun_with(
    file: Path, monkeypatch: pytest.MonkeyPatch, cores_of_then: int | None
) -> None:
    """As one of before points had the same, or on other cores: what its points state is what they are trained with."""
    sweep, folder = read_sweep(file), SweepFolder(Path("out"))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)
    points = make_points(sweep, folder=folder.path)
    threads = None if cores_of_then is None else cores_of_then // 2
    compute = [replace(point.config.compute, cpu_threads=threads) for point in points]
    then = [replace(p, config=replace(p.config, compute=c)) for p, c in zip(points, compute, strict=True)]
    prepare(folder, sweep, then)
    prepare(folder, sweep, points)
    assert {read_dumped(folder.config(p.number).read_text())["compute.cpu_threads"] for p in points} == {threads}
    stated = read_sweep(write(file, options=SWEEP["options"] | {"compute.cpu_threads": 3}))
    with pytest.raises(LaunchOptionError, match=naming("out", "options")):
        prepare(folder, stated, make_points(stated, folder=folder.path))


@pytest.mark.long
def test_sweep_points_weak_and_strong_by_hand(file: Path) -> None:
    points = make_points(read_sweep(file), folder=Path("out"))
    found = [
        (
            *(point.number, point.values["scaling"], point.ranks, point.nodes, point.ranks_per_node),
            *(point.config.batch.global_batch_size, point.config.batch.microbatch_size, point.config.batch.bn_span),
            *(point.config.data.num_synthetic_samples, point.config.run.epochs, point.config.run.directory),
        )
        for point in points
    ]
    assert found == [
        # weak: a microbatch of 32 on each rank; 10 steps
        (0, "weak", 1, 1, 1, 32, 32, 16, 320, 1, "out/points/0/run"),
        (1, "weak", 2, 1, 2, 64, 32, 16, 640, 1, "out/points/1/run"),
        (2, "weak", 4, 1, 2, 128, 32, 16, 1280, 1, "out/points/2/run"),
        # strong: 96 pictures; four ranks have 24 each, whose ghost batches of at most 16 are 12
        (3, "strong", 1, 1, 1, 96, 32, 16, 960, 1, "out/points/3/run"),
        (4, "strong", 2, 1, 2, 96, 24, 12, 960, 1, "out/points/4/run"),
        (5, "strong", 4, 1, 2, 96, 24, 12, 960, 1, "out/points/5/run"),
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "launch", "nodes"),
    [
        ("slurm", {}, [1, 1, 2]),
        ("emulated", {}, [1, 1, 2]),
        ("local", {}, [1, 1, 1]),
        ("mpirun", {}, [1, 1, 1]),
        ("mpirun", {"hosts": "a:1,b:8"}, [1, 2, 2]),
        ("mpirun", {"hosts": "a:1,b:1,a:2"}, [1, 2, 2]),
        ("mpirun", {"hostfile": "hosts"}, [1, 1, 2]),
    ],
)
def test_sweep_nodes_are_those_on_which_ranks_run(
    where: str, launch: dict[str, Any], nodes: list[int], file: Path
) -> None:
    """Of 1, 2 and 4 ranks."""
    file.with_name("hosts").write_text("a slots=3\nb slots=3\n")
    write(file, where=where, launch=launch, grid={"ranks": [1, 2, 4]})
    assert [point.nodes for point in make_points(read_sweep(file), folder=Path("out"))] == nodes


@pytest.mark.long
def test_sweep_of_any_key_and_repeats_with_seeds_of_their_own(file: Path) -> None:
    grid = {"ranks": [1], "comm.algorithm": ["ring", "native"], "optimizer.precision": ["fp32", "bf16"]}
    points = make_points(read_sweep(write(file, grid=grid, repeats=2)), folder=Path("out"))
    values = [(point.config.comm.algorithm, point.config.optimizer.precision) for point in points[:4]]
    assert values == [("ring", "fp32"), ("ring", "bf16"), ("native", "fp32"), ("native", "bf16")]
    assert [(point.repeat, point.config.run.seed) for point in points] == [(0, 0)] * 4 + [(1, 1)] * 4
    swept = make_points(read_sweep(write(file, grid={"ranks": [1], "run.seed": [7, 9]}, repeats=2)), folder=Path("out"))
    assert [point.config.run.seed for point in swept] == [7, 9, 8, 10]
    assert points[5].describe() == "ranks=1, comm.algorithm=ring, optimizer.precision=bf16, repeat 1"


@pytest.mark.long
@pytest.mark.parametrize("name", packaged_sweeps())
def test_sweep_that_is_packaged_makes_points(name: str) -> None:
    sweep = read_sweep(PACKAGED / f"sweeps/{name}.yaml")
    assert sweep.name == name
    assert make_points(sweep, folder=sweep.folder)


def test_sweep_reads_back(file: Path) -> None:
    sweep = read_sweep(file)
    file.write_text(dump_sweep(sweep))
    assert read_sweep(file) == sweep


def test_sweep_times_and_numbers_are_what_they_look_like(file: Path) -> None:
    """YAML 1.1 reads 0:20:00 as 1,200, which Slurm would take for minutes, and 1e-3 as text."""
    text = file.read_text().replace("where: local", "where: slurm").replace("launch: {}", "launch: {time: 0:20:00}")
    file.write_text(text.replace("timeout_minutes: 5", "timeout_minutes: 1e-3"))
    sweep = read_sweep(file)
    assert sweep.launch == {"time": "0:20:00"}
    assert sweep.timeout_minutes == 0.001
    file.write_text(dump_sweep(sweep))
    assert read_sweep(file) == sweep


# --- what is refused ---


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"nam": "x"}, "top level: unknown key nam; the nearest legal one is name"),
        ({"name": "a b; rm -rf $HOME"}, "name 'a b; rm -rf $HOME' must be letters, digits and . _ + @ -"),
        ({"name": "../up"}, "name '../up' must be"),
        ({"where": "cloud"}, "where: 'cloud' must be one of local, mpirun, emulated, slurm"),
        ({"steps": 0}, "steps: 0 must be a number from 1 on"),
        ({"steps": "ten"}, "steps: 'ten' must be of type int | None"),
        ({"timeout_minutes": 0}, "timeout_minutes: 0 must be above 0"),
        ({"grid": {"scaling": ["weak"]}}, "grid: ranks [] must be numbers from 1 on, such as [1, 2, 4]"),
        ({"grid": {"ranks": [1, "2"]}}, "grid: ranks [1, '2'] must be numbers"),
        ({"grid": {"ranks": [1], "scaling": ["big"]}}, "grid: scaling 'big' must be one of weak, strong"),
        (
            {"grid": {"ranks": [1], "comm.algoritm": ["ring"]}},
            "unknown key comm.algoritm; the nearest legal one is comm",
        ),
        ({"grid": {"ranks": [1], "run.seed": []}}, "grid: run.seed has no values"),
        ({"grid": {"ranks": [1, 1]}}, "grid: ranks states a value twice"),
        ({"grid": {"ranks": 4}}, "grid: {'ranks': 4} must be keys with lists of values"),
        ({"launch": {"array": "0-3"}}, "launch, of local: unknown key array"),
        ({"where": "slurm", "launch": {"stop_seconds": 60}}, "launch, of slurm: unknown key stop_seconds"),
        ({"where": "emulated", "launch": {"partition": "gpu"}}, "launch, of emulated: unknown key partition"),
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
    assert not (file.parent / "runs").exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ("keys", "scaling.yaml")),
        ("name: [", ("YAML", "line 1, column 8")),
        ("name: a\nname: b\n", ("YAML", "name", "twice")),
        ("name: a\n", ("config ", "every key")),
    ],
)
def test_sweep_file_that_is_none_is_refused(text: str, named: tuple[str, ...], file: Path) -> None:
    file.write_text(text)
    with pytest.raises(LaunchOptionError, match=naming(file, *named)):
        read_sweep(file)
    with pytest.raises(LaunchOptionError, match=naming(file.with_name("none.yaml"), "No such file")):
        read_sweep(file.with_name("none.yaml"))


@pytest.mark.slow
def test_sweep_points_that_are_impossible_are_all_told_before_anything_starts(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, grid={"ranks": [1, 5, 6], "model.width": [16, -1]})
    assert main(["sweep", str(file)]) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith("bigbatch: 4 of 6 points")
    assert re.match(r"  point 1 \(ranks=1, model\.width=-1\) and 1 more: model\.width=-1 ", error[1])
    assert re.match(r"  point 2 \(ranks=5, model\.width=16\) and 1 more: 5 ranks .*\b2\b.* ranks_per_node", error[2])
    assert len(error) == 3
    assert not (file.parent / "runs").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("batch.microbatch_size", 0), ("batch.microbatch_size", "64"), ("batch.bn_span", 0)),
        *(("batch.global_batch_size", None), ("run.seed", None), ("run.seed", True)),
    ],
)
def test_sweep_sizes_are_whole_numbers(key: str, value: object, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {name: other for name, other in SWEEP["options"].items() if name != key}
    write(file, options=options, grid={"ranks": [1], key: [value]})
    assert main(["sweep", str(file), "--dry-run"]) == 1
    assert f"{key}=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"options": SWEEP["options"] | {"run.directory": "x"}}, ("run.directory",)),
        ({"options": SWEEP["options"] | {"run.epochs": 3}}, ("run.epochs",)),
        ({"grid": SWEEP["grid"] | {"batch.global_batch_size": [96, 192]}}, ("batch.global_batch_size",)),
        ({"where": "emulated", "launch": {"link": None}}, ("link: None",)),
        ({"where": "mpirun", "launch": {"env": {"A": "b"}}}, ("env: {'A': 'b'}",)),
        ({"where": "mpirun", "launch": {"partition": "gpu"}}, ("mpirun", "key partition")),
        (
            {"grid": {"ranks": [1], "batch.microbatch_size": [8, 16]}},
            ("batch.microbatch_size: ", "options", "grid"),
        ),
        ({"timeout_minutes": 10**9}, ("timeout_minutes: 1000000000",)),
    ],
)
def test_sweep_file_that_would_be_ignored_or_misread_is_refused(
    changes: dict[str, Any], named: tuple[str, ...], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, **changes)
    assert main(["sweep", str(file), "--dry-run"]) == 1
    assert re.search(naming(*named), capsys.readouterr().err)


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "launch", "folder", "named"),
    [
        ("emulated", {"link": "1gbite"}, "f", ("launch: ", "--link '1gbite'", "1mbit", "100gbit")),
        ("emulated", {"launcher": "ssh"}, "f", ("launch: ", "--launcher", "'ssh'")),
        ("slurm", {"partition": True}, "f", ("launch: ", "--partition", "argument")),
        ("emulated", {"launcher": "torchrun", "place": "cyclic"}, "f", ("launch: ", "--place cyclic", "torchrun")),
        ("slurm", {"gpus_per_node": "many"}, "f", ("launch: ", "--gpus-per-node", "'many'")),
        ("slurm", {"time": "soon"}, "f", ("launch: ", "--time 'soon'")),
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
    monkeypatch.setattr(running, "run_point", None)
    write(file, where="emulated", grid={"ranks": [4]})
    assert main(["sweep", str(file), "--folder", "f", *more]) == 1
    told = capsys.readouterr()
    assert re.search(naming(runtime / "bigbatch-emulate", "chmod 700"), told.err)
    assert (told.err.count("\n"), told.out) == (1, "")
    assert not (file.parent / "f").exists()


def test_sweep_steps_are_of_generated_tensors(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(file, options={})
    assert main(["sweep", str(file)]) == 1
    assert re.search(naming("steps: 10", "data.loader: synthetic"), capsys.readouterr().err)


@pytest.mark.long
@pytest.mark.parametrize("points", ["9", "1-9", "3-1", "0-99999999999", "x", "-1", "1-", "²"])
def test_sweep_points_that_are_not_there(points: str, file: Path) -> None:
    assert main(["sweep", str(file), f"--points={points}", "--dry-run"]) == 1


# --- what would run ---


@pytest.mark.long
def test_sweep_commands_of_every_place(file: Path) -> None:
    folder = SweepFolder(Path("f"))
    train = ["--", "train", "--config", "f/points/5/config.yaml"]
    start = [*bigbatch_argv(), "launch"]
    for where, launch, middle in (
        ("local", {}, ["local", "--ranks", "4"]),
        ("mpirun", {"hosts": "n0:2,n1:2"}, ["mpirun", "--ranks", "4", "--hosts=n0:2,n1:2"]),
        ("emulated", {"link": "1gbit"}, ["emulate", "run", "--nodes", "2", "--ranks-per-node", "2", "--link=1gbit"]),
    ):
        sweep = read_sweep(write(file, where=where, launch=launch))
        point = make_points(sweep, folder=folder.path)[5]
        assert point_command(sweep, point, folder) == [*start, *middle, *train]


def test_sweep_of_an_own_script(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In every place; refused where it is not there, before any point is made."""
    (file.parent / "mine.py").touch()
    small = {"script": ["mine.py", "--", "-x"], "grid": {"ranks": [2]}}
    for where in ("local", "mpirun", "emulated", "slurm"):
        write(file, where=where, **small)
        assert main(["sweep", str(file), "--dry-run"]) == 0
        number = "{index}" if where == "slurm" else "0"
        shown = f" --python -- mine.py -- -x --config runs/sweeps/small/points/{number}/config.yaml"
        assert shown in capsys.readouterr().out.replace("'", "")
    (file.parent / "mine.py").rename(file.parent / "mime.py")
    assert main(["sweep", str(file)]) == 1
    assert "there is no script mine.py here; the nearest is mime.py" in capsys.readouterr().err
    assert not (file.parent / "runs").exists()
    for wrong in ([], "mine.py", [1]):
        write(file, **small | {"script": wrong})
        assert main(["sweep", str(file)]) == 1
        assert "script: " in capsys.readouterr().err


@pytest.mark.long
def test_sweep_has_one_array_for_each_number_of_ranks(file: Path) -> None:
    sweep = read_sweep(write(file, where="slurm", launch={"partition": "gpu", "env": ["A=1", "B=2"]}))
    folder = SweepFolder(Path("f"))
    found = arrays(make_points(sweep, folder=folder.path))
    assert {ranks: [point.number for point in points] for ranks, points in found.items()} == {
        1: [0, 3],
        2: [1, 4],
        4: [2, 5],
    }
    assert array_words(sweep, found[4], folder, name="small-1") == [
        *("slurm", "--nodes", "2", "--ranks-per-node", "2", "--array", "2,5", "--name", "small-1", "--logs", "f/logs"),
        *("--stop-seconds", "0", "--time", "5"),
        *("--partition=gpu", "--env=A=1", "--env=B=2", "--", "train", "--config", "f/points/{index}/config.yaml"),
    ]


def test_sweep_launch_options_without_a_value() -> None:
    assert launch_words({"some_flag": True, "link": "none"}) == ["--some-flag", "--link=none"]


@pytest.mark.long
def test_sweep_dry_run_writes_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(file), "--dry-run", "--points", "0,4-5"]) == 0
    printed = capsys.readouterr().out
    assert [line[:8] for line in printed.splitlines() if line.startswith("point ")] == [
        "point 0:",
        "point 4:",
        "point 5:",
    ]
    assert main(["sweep", str(file), "--dry-run", "--where", "slurm"]) == 0
    assert capsys.readouterr().out.count("#SBATCH --array=") == 3
    assert os.listdir(file.parent) == ["sweep.yaml"]


# --- what becomes of them ---


TRAIN = """
import json, os, pathlib, sys, time, yaml
config = yaml.safe_load(open(sys.argv[1]))
run = pathlib.Path(config["run"]["directory"])
run.mkdir(parents=True)
code = int(os.environ["FAKE_CODE"]) if config["run"]["seed"] == 0 else 0
if code == 3:
    print("bigbatch: something else\\nbigbatch: no such picture")
elif code == 5:
    time.sleep(600)
else:
    (run / "summary.json").write_text(json.dumps({"images_per_second": 1234.5}))
sys.exit(code)
"""


@pytest.fixture
def fake(file: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    """Two points; the first one ends as FAKE_CODE says."""
    write(file, grid={"ranks": [1]}, repeats=2)
    script = file.with_name("train.py")
    script.write_text(TRAIN)
    monkeypatch.setattr(
        running,
        "point_command",
        lambda sweep, point, folder: [sys.executable, str(script), str(folder.config(point.number))],
    )
    return SweepFolder(file.with_name("f"))


def states(folder: SweepFolder) -> list[str]:
    return [read_state(folder, number)["state"] for number in folder.numbers()]


@pytest.mark.long
def test_sweep_point_that_failed_does_not_end_the_others_and_is_tried_again_when_asked(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", str(file), "--folder", str(fake.path)]
    monkeypatch.setenv("FAKE_CODE", "3")
    assert main(command) == 3
    assert states(fake) == ["failed", "done"]
    state = read_state(fake, 0)
    assert (state["reason"], state["exit_code"]) == ("no such picture", 3)
    printed = capsys.readouterr().out
    assert "point 0 (ranks=1): failed: no such picture; 1 of 2" in printed
    assert "point 1 (ranks=1, repeat 1): 1,234 images/s; 2 of 2" in printed
    assert "1 of 2 points failed; --retry-failed runs them again" in printed

    monkeypatch.setenv("FAKE_CODE", "0")
    started = read_state(fake, 1)["started"]
    assert main(command) == 3  # nothing is missing; one has failed
    assert "2 points, 0 to run" in capsys.readouterr().out
    assert main([*command, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "1,234 images/s" in printed
    assert "nothing would run" in printed
    assert main([*command, "--dry-run", "--retry-failed"]) == 0
    printed = capsys.readouterr().out
    assert [line[:8] for line in printed.splitlines() if line.startswith("point ")] == ["point 0:"]
    assert main([*command, "--retry-failed"]) == 0
    assert states(fake) == ["done", "done"]
    assert read_state(fake, 1)["started"] == started, "a point that is done is kept"


@pytest.mark.slow
def test_sweep_point_that_takes_too_long_is_ended(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(file, grid={"ranks": [1]}, timeout_minutes=0.01)
    monkeypatch.setenv("FAKE_CODE", "5")
    assert main(["sweep", str(file), "--folder", str(fake.path)]) == 3
    assert read_state(fake, 0)["reason"] == "took longer than 0.01 min, and was ended"


LAUNCHER = """
import os, signal, subprocess, sys
rank = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
ranks = [
    subprocess.Popen([sys.executable, "-c", rank], stdout=subprocess.PIPE, **kind)
    for kind in ({}, {"process_group": 0}, {"start_new_session": True})
]
for each in ranks:
    each.stdout.readline()
if sys.argv[1] == "stays":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), *(each.pid for each in ranks), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("launcher", ["stays", "leaves"])
def test_sweep_point_that_is_ended_is_outlived_by_no_rank(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI gives ranks process groups of their own, torchrun sessions; these ignore SIGTERM."""
    monkeypatch.setattr(running, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(running, "LEAVE_SECONDS", 0.1)
    argv = [sys.executable, "-c", LAUNCHER, launcher]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        pids = set(map(int, process.stdout.readline().split()))
        sessions = {os.getsid(pid) for pid in pids}
        assert pids == {each.pid for each in processes_in(sessions)}
        running._end(process)
        left = {each.pid for each in processes_in(sessions)}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left


def test_sweep_point_that_is_gone_already_leaves_its_own_session() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as process:
        process.wait()
    assert sessions_under(process.pid) == {process.pid}


@pytest.mark.slow
def test_sweep_under_nohup_goes_on_without_its_terminal(file: Path, fake: SweepFolder) -> None:
    """The point itself plays the terminal, and ends well."""
    point = (
        "import json, os, pathlib, signal; os.kill(os.getppid(), signal.SIGHUP)\n"
        "run = pathlib.Path(os.environ['RUN']); run.mkdir(parents=True); (run / 'summary.json').write_text('{}')"
    )
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from bigbatch.launch.sweep import running\n"
        "from bigbatch.cli import main\n"
        f"running.point_command = lambda *_: [sys.executable, '-c', {point!r}]\n"
        f"sys.exit(main(['sweep', {str(file)!r}, '--folder', {str(fake.path)!r}, '--points=0']))\n"
    )
    environ = {**os.environ, "RUN": str(fake.run(0).path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, env=environ)
    assert done.returncode == 0, done.stderr
    assert states(fake) == ["done", "missing"]


@pytest.mark.long
def test_sweep_point_is_missing_after_ctrl_c(file: Path, fake: SweepFolder) -> None:
    """Through the real command, since signals go to processes; the point itself plays the person."""
    point = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    script = (
        "import sys\n"
        "from bigbatch.launch.sweep import running\n"
        "from bigbatch.cli import main\n"
        f"running.point_command = lambda *_: [sys.executable, '-c', {point!r}]\n"
        f"sys.exit(main(['sweep', {str(file)!r}, '--folder', {str(fake.path)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 130, done.stderr
    assert re.fullmatch("bigbatch: stopped, .*\n", done.stderr)
    assert states(fake) == ["missing", "missing"]


@pytest.mark.long
def test_sweep_folder_of_others_is_refused(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_CODE", "0")
    assert main(["sweep", str(file), "--folder", str(fake.path)]) == 0
    write(file, steps=11, grid={"ranks": [1]}, repeats=2)
    assert main(["sweep", str(file), "--folder", str(fake.path)]) == 1
    assert re.search(naming(fake.path, "steps: 10", " 11", "--folder"), capsys.readouterr().err)
    assert main(["sweep", str(file), "--folder", str(fake.path), "--dry-run"]) == 1, "its states are of other points"
    assert re.search(naming(fake.path, "steps: 10", " 11"), capsys.readouterr().err)
    other = file.with_name("other")
    other.mkdir()
    (other / "thesis.tex").touch()
    assert main(["sweep", str(file), "--folder", str(other)]) == 1
    assert re.search(naming(other, "empty"), capsys.readouterr().err)
    assert sorted(os.listdir(other)) == [".lock", "thesis.tex"]


@pytest.mark.long
def test_sweep_points_of_another_experiment_are_refused_and_stay_as_they_are(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_CODE", "0")
    base = file.with_name("base.yaml")
    base.write_text((PACKAGED / "quickstart.yaml").read_text())
    write(file, config="base.yaml", grid={"ranks": [1]}, repeats=2)
    command = ["sweep", str(file), "--folder", str(fake.path)]
    assert main([*command, "--points", "0"]) == 0
    before = [fake.config(number).read_text() for number in (0, 1)]
    assert main([*command[:-1], os.path.relpath(fake.path), "--dry-run"]) == 0, "the same folder, named otherwise"
    text = base.read_text()
    changed = re.sub(r"base_lr: .*", "base_lr: 0.75", text)
    assert changed != text
    base.write_text(changed)
    capsys.readouterr()
    for more in (["--dry-run"], []):
        assert main([*command, *more]) == 1
        error = capsys.readouterr().err
        assert re.search(naming(fake.config(0), "schedule.base_lr=", "0.75", "base.yaml"), error)
        assert error.count("\n") == 1
    assert [fake.config(number).read_text() for number in (0, 1)] == before
    fake.config(0).write_text("[")
    assert main(command) == 1
    assert re.search(naming(fake.config(0), f"remove {fake.point(0)}"), capsys.readouterr().err)


@pytest.mark.slow
def test_sweep_folder_that_cannot_be_locked_is_told(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setenv("FAKE_CODE", "0")
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert main(["sweep", str(file), "--folder", str(fake.path)]) == 0
    assert re.fullmatch(rf"bigbatch: {fake.path} .*Function not implemented.*\n", capsys.readouterr().err)


@pytest.mark.slow
def test_sweep_on_a_full_disk_ends_with_one_line(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert main(["sweep", str(file), "--folder", str(fake.path)]) == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert error.count("\n") == 1


CPU_MEMORY = "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"
GPU_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
JOB_MEMORY = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0"
TIME_LIMIT = "slurmstepd: error: *** JOB 7 ON n0 CANCELLED AT 2026-11-21T08:31:23 DUE TO TIME LIMIT ***"
OVER_TIME = "took longer than its time limit, and was ended"


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("step\nbigbatch: a\nbigbatch: b\n", 1, "b"),
        ("bigbatch: a\nbigbatch: rank 1 ended with exit code 1; ending the others\n", 1, "a"),
        ("bigbatch: rank 1 ended with exit code 1\n", 1, "rank 1 ended with exit code 1"),
        ("bigbatch: a\nbigbatch: rank 1 was ended by SIGSEGV\n", 139, "rank 1 was ended by SIGSEGV"),
        (f"{CPU_MEMORY}\nbigbatch: x", 1, f"out of memory: {CPU_MEMORY}"),
        (GPU_MEMORY, 1, f"out of memory: {GPU_MEMORY}"),
        ("bigbatch: out of memory: 9 does not fit", 1, "out of memory: 9 does not fit"),
        (JOB_MEMORY, None, f"out of memory: {JOB_MEMORY}"),
        ("", 137, "killed, most likely by the kernel, out of memory"),
        ("last words", 7, "exit code 7: last words"),
        ("", None, "the job ended, and printed nothing"),
        ("bigbatch: no such picture\nbigbatch: 2026-11-21 08:30:00 ended with exit code 1", None, "no such picture"),
        (f"bigbatch: 2026-11-21 08:30:00 ended with exit code 130\n{TIME_LIMIT}", None, OVER_TIME),
    ],
)
def test_sweep_job_log_reasons(text: str, code: int | None, reason: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    assert find_reason(tmp_path / "log", exit_code=code) == reason
    assert find_reason(tmp_path / "none", exit_code=7) == "exit code 7, and printed nothing"


FIRST = "bigbatch: 2026-11-21 08:20:00 job 7 on n0, restart 0"
AGAIN = "bigbatch: 2026-11-21 08:30:00 job 7 on n1, restart 1"
ENDED = "bigbatch: 2026-11-21 08:30:41 ended with exit code 0"


@pytest.mark.parametrize(
    ("lines", "minute", "seconds"),
    [
        ((FIRST, "a step", AGAIN, "a step", ENDED), 30, 41.0),
        ((FIRST, "a step", ENDED), 20, 641.0),
        ((FIRST, TIME_LIMIT, "last words"), 20, 683.0),
        ((FIRST, "a step"), 20, None),
        (("a step", ENDED), None, None),
    ],
)
def test_sweep_job_log_time_in_the_queue_does_not_count(
    lines: tuple[str, ...], minute: int | None, seconds: float | None, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    began = None if minute is None else datetime(2026, 11, 21, 8, minute).timestamp()
    assert find_times(tmp_path / "log") == (began, seconds)
    assert find_times(tmp_path / "none") == (None, None)


# --- Slurm ---

SBATCH = r"""#!/bin/sh
cat > "$STUBS/script"
if grep -q -- "--nodes=${STUB_REFUSES:-none}\$" "$STUBS/script"; then
  echo "sbatch: error: Node count specification invalid" >&2; exit 1
fi
mv "$STUBS/script" "$STUBS/script-$(ls "$STUBS" | grep -c script-)"
echo 7
"""
SQUEUE = """#!/bin/sh
for word in "$@"; do
  case $word in --name=*)
    [ -n "$STUB_FORGETS" ] && exit 0
    grep -qx "#SBATCH --job-name=${word#--name=}" "$STUBS"/script-* && echo 7
    exit 0 ;;
  esac
done
[ -s "$STUBS/down" ] && { cat "$STUBS/down" >&2; exit 1; }
cat "$STUBS/queue"
"""


@pytest.fixture
def slurm(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stubs = file.with_name("stubs")
    stubs.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{stubs}:{os.environ['PATH']}")
    monkeypatch.setenv("STUBS", str(stubs))
    monkeypatch.setattr(queueing, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(queueing, "POLL_SECONDS", 0.01)
    (stubs / "queue").write_text("3\n7_0\n7_1\n9_[0-5]\n")
    write(file, where="slurm", launch={"partition": "gpu"}, grid={"ranks": [1], "run.seed": [4, 5]})
    return stubs


@pytest.mark.long
def test_sweep_points_go_through_the_slurm_queue(file: Path, slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", str(file), "--folder", "f"]
    assert main([*command, "--no-wait"]) == 0
    folder = SweepFolder(Path("f"))
    assert states(folder) == ["submitted", "submitted"]
    script = (slurm / "script-0").read_text()
    assert "#SBATCH --array=0,1\n" in script
    assert "#SBATCH --signal=B:USR1@0\n" in script, "a point at its time limit does not go on"
    told = "2 points are in Slurm's queue (scancel 7 would end them); the same command collects what came out"
    assert told in capsys.readouterr().out
    assert queueing.queued(["7"]) == {("7", 0), ("7", 1)}
    (slurm / "queue").write_text("")
    folder.run(0).path.mkdir()
    folder.run(0).summary.write_text(json.dumps({"images_per_second": 10}))
    log = folder.path / read_state(folder, 1)["log"]
    name = read_state(folder, 1)["job_name"]
    assert f"#SBATCH --job-name={name}\n" in script
    assert log == Path(f"f/logs/{name}-7_1.log")
    log.write_text(f"{FIRST}\nbigbatch: rank 1 on n1 does not answer\n{ENDED}\n".replace("code 0", "code 1"))
    assert main(command) == 3
    assert states(folder) == ["done", "failed"]
    state = read_state(folder, 1)
    assert (state["reason"], state["seconds"]) == ("rank 1 on n1 does not answer", 641.0)
    assert len(list(slurm.glob("script-*"))) == 1, "nothing was submitted twice"


@pytest.mark.long
@pytest.mark.parametrize(
    ("known", "has_log", "submissions"),
    [("squeue", False, 1), ("forgotten", True, 1), ("forgotten", False, 2)],
)
def test_sweep_that_ended_before_it_knew_its_slurm_jobs_number_does_not_submit_twice(
    known: str, has_log: bool, submissions: int, file: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    command, folder = ["sweep", str(file), "--folder", "f", "--no-wait"], SweepFolder(Path("f"))
    with monkeypatch.context() as patched:
        patched.setattr(queueing, "_note_job", die)
        assert main(command) == 130
    assert [read_state(folder, number)["job"] for number in (0, 1)] == [None, None]
    if has_log:
        (folder.logs / f"{read_state(folder, 0)['job_name']}-7_1.log").touch()
    if known == "forgotten":
        monkeypatch.setenv("STUB_FORGETS", "1")
    assert main(command) == 0
    assert len(list(slurm.glob("script-*"))) == submissions
    for number in (0, 1):
        state = read_state(folder, number)
        assert (state["state"], state["job"]) == ("submitted", "7")
        assert state["log"] == f"logs/{state['job_name']}-7_{number}.log"


@pytest.mark.long
def test_sweep_waits_for_cancelled_slurm_points_together(
    file: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing came of them, and their files may only be late."""
    command = ["sweep", str(file), "--folder", "f"]
    assert main([*command, "--no-wait"]) == 0
    (slurm / "queue").write_text("")
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(queueing, "time", clock)
    monkeypatch.setattr(queueing, "SETTLE_SECONDS", 30.0)
    monkeypatch.setattr(queueing, "POLL_SECONDS", 5.0)
    assert main(command) == 3
    assert now == [30.0]
    assert states(SweepFolder(Path("f"))) == ["failed", "failed"]


@pytest.mark.slow
def test_sweep_says_at_ctrl_c_what_goes_on_in_slurm(
    file: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(queueing.time, "sleep", press)
    assert main(["sweep", str(file), "--folder", "f"]) == 130
    assert re.fullmatch(r"bigbatch: stopped; 2 points .*\bscancel 7\b.*\n", capsys.readouterr().err)
    assert states(SweepFolder(Path("f"))) == ["submitted", "submitted"]


@pytest.mark.long
def test_sweep_array_that_slurm_refuses_fails_alone_and_in_its_words(
    file: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Point 1, of two nodes; point 0 is collected by the same command."""
    write(file, where="slurm", launch={}, grid={"ranks": [1, 4]})
    monkeypatch.setenv("STUB_REFUSES", "2")
    command, folder = ["sweep", str(file), "--folder", "f"], SweepFolder(Path("f"))
    assert main([*command, "--no-wait"]) == 3
    assert states(folder) == ["submitted", "failed"]
    reason = "sbatch: error: Node count specification invalid"
    assert re.search(rf"point 1 \(ranks=4\): failed: .*{reason}", capsys.readouterr().out)
    (slurm / "queue").write_text("")
    folder.run(0).path.mkdir()
    folder.run(0).summary.write_text(json.dumps({"images_per_second": 10}))
    assert main(command) == 3
    assert states(folder) == ["done", "failed"]
    assert read_state(folder, 1)["reason"].count(reason) == 1
    monkeypatch.delenv("STUB_REFUSES")
    (slurm / "queue").write_text("7_1\n")
    assert main([*command, "--retry-failed", "--no-wait"]) == 0
    assert states(folder) == ["done", "submitted"]


@pytest.mark.slow
def test_sweep_refuses_nothing_where_slurm_does_not_answer(
    file: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Unable to contact controller' >&2; exit 1\n")
    (slurm / "squeue").write_text("#!/bin/sh\necho 'Unable to contact controller' >&2; exit 1\n")
    assert main(["sweep", str(file), "--folder", "f"]) == 1
    assert "sbatch: error: Unable to contact controller" in capsys.readouterr().err
    assert states(SweepFolder(Path("f"))) == ["submitted", "submitted"], "the same command asks again"


@pytest.mark.long
def test_sweep_without_waiting_collects_points_that_left_the_slurm_queue(
    file: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, folder = ["sweep", str(file), "--folder", "f", "--no-wait"], SweepFolder(Path("f"))
    assert main(command) == 0
    (slurm / "queue").write_text("7_1\n")
    folder.run(0).path.mkdir()
    folder.run(0).summary.write_text(json.dumps({"images_per_second": 1234.5}))
    capsys.readouterr()
    assert main(command) == 0
    assert states(folder) == ["done", "submitted"]
    printed = capsys.readouterr().out
    assert "1,234 images/s" in printed
    assert "1 point is in Slurm's queue (scancel 7 would end them)" in printed
    (slurm / "queue").write_text("")
    assert main(command) == 3
    assert states(folder) == ["done", "failed"]


@pytest.mark.long
def test_sweep_takes_a_slurm_queue_that_does_not_answer_for_no_end_of_jobs(
    file: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers again after three minutes, at first; then it answers no more."""
    command, folder = ["sweep", str(file), "--folder", "f"], SweepFolder(Path("f"))
    assert main([*command, "--no-wait"]) == 0
    (slurm / "down").write_text("slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(SchedulerError, match="Unable to contact slurm controller"):
        queueing.queued(["7"])
    assert main([*command, "--no-wait"]) == 0
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] == 180:
            (slurm / "down").unlink()
            (slurm / "queue").write_text("7_1\n")
            folder.run(0).path.mkdir()
            folder.run(0).summary.write_text(json.dumps({"images_per_second": 10}))
        if now[0] == 240:
            (slurm / "down").write_text("slurm_load_jobs error: Unable to contact slurm controller")

    monkeypatch.setattr(queueing, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(queueing, "POLL_SECONDS", 60.0)
    capsys.readouterr()
    assert main(command) == 1
    assert now == [180 + 600]
    assert states(folder) == ["done", "submitted"]
    error = capsys.readouterr().err
    assert error.count("Unable to contact slurm controller; jobs go on") == 2, "once an outage"
    assert len(error.splitlines()) == 3


def test_sweep_ends_a_program_of_slurm_that_hangs(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(slurm_queue, "ANSWER_SECONDS", 0.1)
    with pytest.raises(SchedulerError, match=naming("squeue", "0.1 s")):
        queueing.queued(["7"])


@pytest.mark.long
def test_sweep_point_config_is_the_whole_experiment(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CODE", "0")
    assert main(["sweep", str(file), "--folder", str(fake.path)]) == 0
    config = load_config(["--config", str(fake.config(1))])
    assert (config.run.directory, config.run.seed) == (str(fake.path / "points/1/run"), 1)


def test_sweep_table_aligns_numbers_and_writes_values_as_the_file_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = SimpleNamespace(global_batch_size=65_536, microbatch_size=64)
    config: Any = SimpleNamespace(batch=batch)
    points = [
        Point(0, {"comm.overlap": True, "ranks": ranks}, 0, ranks, 1, nodes=ranks, config=config) for ranks in (8, 16)
    ]
    print_table(SweepFolder(tmp_path), points)
    rows = [line for line in capsys.readouterr().out.splitlines() if "missing" in line]
    assert [row.split("│")[2:5] for row in rows] == [
        [" true         ", "     8 ", "     8 "],
        [" true         ", "    16 ", "    16 "],
    ]
    assert "65,536" in rows[0]
