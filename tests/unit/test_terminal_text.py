"""Printed names from outside contain no control sequences, and one line stays one line."""

import ast
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from mlperf_runs import write_run
from PIL import Image
from played_flights import play
from small_sweep import SWEEP

from bigbatch.cli import main
from bigbatch.errors import CommError, add_note, show_uncaught
from bigbatch.trainer.checkpoint.checkpoint import save_checkpoint
from bigbatch.trainer.checkpoint.class_names import to_keep
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.models import build_model

ROOT = Path(__file__).resolve().parents[2]
NAME = "x\x1b]0;owned\x07\nforged\r\x9b2J\u202e[red]"
"""Sets a terminal's title, begins a line, goes back to its start, clears the screen, turns the text around."""
KEYS = ("--model.options.width=4", "--data.image_size=32", "--data.loader=torchvision", "--data.num_threads=1")
Make = Callable[[Path], list[str]]


def class_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "train").iterdir())


def write_trained(folder: Path) -> tuple[Path, Path]:
    """Write a data set and a run, both with a class and an image of that name."""
    data, run = folder / "data", folder / "run"
    write_dataset(data, train_per_class=1, val_per_class=1, side_pixels=(50, 60))
    for split in ("train", "val"):
        first = min((data / split).iterdir())
        image = min(first.iterdir())
        image.rename(image.with_name(f"{NAME}.jpg"))
        first.rename(first.with_name(NAME))
    config = load_config(["--config", "quickstart", *KEYS, f"--data.root={data}"])
    model = build_model("resnet9", num_classes=10, norm=torch.nn.BatchNorm2d, width=4)
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config))
    state = {"step": 1, "config": dump_config(config), "model": model.state_dict()}
    save_checkpoint(run / "checkpoints", state | {"classes": to_keep(class_names(data))}, step=1, top1=0.5, keep=1)
    return run, data


def predict(folder: Path) -> list[str]:
    run, data = write_trained(folder)
    return ["predict", str(run), str(data / "val" / NAME / f"{NAME}.jpg"), "--top=10", "--data.num_threads=1"]


def evaluate(folder: Path) -> list[str]:
    run, data = write_trained(folder)
    (data / "val" / NAME / f"{NAME}.jpg").write_bytes(b"")
    (data / "val" / NAME / f"{NAME}.txt").write_bytes(b"")
    return ["evaluate", str(run), "--data.max_skipped=9"]


def export(folder: Path) -> list[str]:
    run, _ = write_trained(folder)
    return ["export", str(run), "--format=safetensors", "--out", str(folder / f"{NAME}.safetensors")]


def check(folder: Path) -> list[str]:
    _, data = write_trained(folder)
    (data / "train" / NAME / f"{NAME}2.jpg").write_bytes(b"")
    (data / "train" / NAME / f"{NAME}.txt").write_bytes(b"")
    shutil.copytree(data / "val" / NAME, data / "val" / f"{NAME}3")
    return ["data", "check", str(data)]


def pack(folder: Path) -> list[str]:
    _, data = write_trained(folder)
    (data / "train" / NAME / f"{NAME}.txt").write_bytes(b"")
    return ["data", "pack", str(data), str(folder / NAME), "--workers=1"]


def init(folder: Path) -> list[str]:
    (folder / "set").mkdir()
    Image.new("RGB", (9, 9)).save(folder / "set/a.jpg")
    (folder / "set" / f"{NAME}.jpg").write_bytes(b"")
    (folder / "set/labels.csv").write_text(f'image,label\na.jpg,"{NAME}"\n"{NAME}2.jpg",b\n')
    return ["init", str(folder / "set"), "--out", str(folder / "set.yaml")]


def told_run(folder: Path) -> Path:
    """A run whose records and summary hold the name as a reason, as a key and as a text."""
    run = write_run(folder / NAME)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "skipped", "step": 1, "time": 2e9, "reason": NAME, "images": [NAME]}) + "\n")
        file.write(json.dumps({"kind": "hint", "step": 1, "time": 2e9, "text": NAME}) + "\n")
    summary = {"ended": NAME, "device": NAME, "job": {"device": NAME, "host": NAME}, NAME: NAME, "loss": NAME}
    (run / "summary.json").write_text(json.dumps(summary))
    return run


def report(folder: Path) -> list[str]:
    return ["report", str(told_run(folder)), "--output", str(folder / "report")]


def verify_damaged(folder: Path) -> list[str]:
    run = told_run(folder)
    (run / "metrics.jsonl").write_text(json.dumps({"kind": NAME, "time": 2e9}) + "\n")
    return ["verify", str(run)]


def diff(folder: Path) -> list[str]:
    a, _ = write_trained(folder)
    b, _ = write_trained(folder / NAME) if (folder / NAME).mkdir() is None else (a, a)
    return ["diff", str(a), str(b)]


def recipe(folder: Path) -> Path:
    path = folder / f"{NAME}.yaml"
    path.write_text(yaml.safe_dump({"base": "quickstart", "data": {"root": NAME}, "model": {"weights": NAME}}))
    return path


def config_show(folder: Path) -> list[str]:
    return ["config", "show", str(recipe(folder))]


def unknown_key(folder: Path) -> list[str]:
    path = folder / f"{NAME}.yaml"
    path.write_text(yaml.safe_dump({"run": {NAME: NAME}, NAME: 1}))
    return ["train", "--config", str(path)]


def sweep(folder: Path) -> list[str]:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({**SWEEP, "grid": {"data.root": [NAME], "ranks": [1]}}))
    return ["sweep", str(path), "--dry-run", "--folder", str(folder / NAME)]


def sweep_name(folder: Path) -> list[str]:
    path = folder / f"{NAME}.yaml"
    path.write_text(yaml.safe_dump({**SWEEP, "name": NAME, NAME: NAME}))
    return ["sweep", str(path), "--dry-run"]


def simulate(folder: Path) -> list[str]:
    cluster = folder / f"{NAME}.yaml"
    cluster.write_text((ROOT / "configs/clusters/dgx_a100.yaml").read_text())
    return ["simulate", "imagenet/resnet50_64k", "--cluster", str(cluster), "--gpus", "8"]


def explain(folder: Path) -> list[str]:
    ranks = play(2)
    ranks[0].call("all_reduce", "started")
    for each in ranks:
        each.write(folder, form="json")
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("nccl:all_reduce", json.dumps(NAME)[1:-1]))
    (folder / f"{NAME}.json").write_text("{")
    return ["explain", str(folder)]


COMMANDS: tuple[Make, ...] = (
    *(predict, evaluate, export, check, pack, init, report, verify_damaged, diff, config_show, unknown_key),
    *(sweep, sweep_name, simulate, explain),
)


@pytest.mark.filterwarnings("error:Glyph")  # matplotlib would print one that a plot is to show as it is
@pytest.mark.parametrize("make", COMMANDS)
def test_terminal_obeys_no_name_that_a_command_prints(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inside").mkdir()
    words = make(tmp_path / "inside")
    capsys.readouterr()
    with suppress(SystemExit):
        main(words)
    out, err = capsys.readouterr()
    lines = f"{out}\n{err}".split("\n")
    assert "Traceback" not in err
    assert "]0;owned" in out + err, "it prints no such name"
    assert [line for line in lines if not line.isprintable() or line.startswith("forged")] == []


RAW = {
    "bigbatch/errors.py": "the one place",
    "bigbatch/cli.py": "words of its own",
    "bigbatch/completion.py": "a script of words of its own",
    "tools/measure/report.py": "a line of its own that goes back over itself",
    "tools/emulate/keeper.py": "numbers, to the process that started it",
    "launch/jobs/foreground.py": "words of its own",
    "launch/launchers/mpirun.py": "a line for a shell",
    "launch/launchers/slurm.py": "what the job's nodes said, which was printable there",
    "launch/start.py": "a job's script, or a line for a shell",
    "trainer/build/compiled.py": "words of its own",
}


def raw_prints(source: str) -> Iterator[int]:
    """Yield the line of each use of print except a call with JSON, which holds no such character."""
    nodes = [*ast.walk(ast.parse(source))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    of_json = [each.func for each in calls if ast.unparse(each.args[0]).startswith(("json.dumps(", "as_json("))]
    for node in nodes:
        if isinstance(node, ast.Name) and node.id == "print" and node not in of_json:
            yield node.lineno


def test_scripts_errors_are_one_line_with_the_scripts_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    """An error that a user can fix; a defect keeps its traceback."""
    script = compile("def act(error):\n    raise error\n\nact(error)", "own.py", "exec")
    hidden = CommError("no rank\x1b[2J answers")
    add_note(hidden, "see the log")
    for error in (hidden, KeyError("defect")):
        try:
            exec(script, {"__name__": "__main__", "error": error})
        except (CommError, KeyError) as raised:
            show_uncaught(type(raised), raised, raised.__traceback__)
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == [r"bigbatch: own.py:2: CommError: no rank\x1b[2J answers", "see the log"]
    assert said[2].startswith("Traceback")
    assert said[-1] == "KeyError: 'defect'"


def test_lines_are_printed_in_one_place() -> None:
    """Only print_line and print_lines of bigbatch/errors.py print; they remove control characters."""
    rooms = ("bigbatch", "comm", "trainer", "launch", "tools", "experiments")
    sources = {str(path.relative_to(ROOT)): path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py")}
    printing = {name: source for name, source in sources.items() if "print" in source}
    found = {name: lines for name, source in printing.items() if (lines := list(raw_prints(source)))}
    assert {name: lines for name, lines in found.items() if name not in RAW} == {}
    assert RAW.keys() - found.keys() == set(), "these print nothing raw any more"
    lines = ("print(name)", "print(json.dumps(name))", "print(as_json(name))", "out.print(name)", "say = print")
    assert sorted(raw_prints("\n".join(lines))) == [1, 5]
