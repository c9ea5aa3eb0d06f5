"""What would run: commands of every place, arrays of Slurm jobs, a dry run."""

from pathlib import Path

import pytest
from small_sweep import write

from bigbatch.cli import main
from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.experiments.engine.jobs import array_words, arrays, point_command
from bigbatch.experiments.engine.plan import read_plan
from bigbatch.experiments.engine.points import make_points
from bigbatch.interpreter import bigbatch_argv


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
        sweep = read_plan(write(file, where=where, launch=launch))
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
        out = capsys.readouterr().out
        assert out.count("#SBATCH --array=0") == (where == "slurm")
        shown = f" --python -- mine.py -- -x --config runs/sweeps/small/points/{number}/config.yaml"
        assert shown in out.replace("'", "")
    (file.parent / "mine.py").rename(file.parent / "mime.py")
    assert main(["sweep", str(file)]) == 1
    assert "there is no script mine.py on this host; the nearest is mime.py" in capsys.readouterr().err
    assert not (file.parent / "runs").exists()
    for wrong in ([], "mine.py", [1]):
        write(file, **small | {"script": wrong})
        assert main(["sweep", str(file)]) == 1
        assert "script: " in capsys.readouterr().err


@pytest.mark.long
def test_sweep_has_one_array_for_each_number_of_ranks(file: Path) -> None:
    sweep = read_plan(write(file, where="slurm", launch={"partition": "gpu", "env": ["A=1", "B=2"]}))
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
