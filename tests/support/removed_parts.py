"""Removes one part after another from a copy of the sources, and trains without it.

Each part is an entry of a table (name -> import path). Its file and its line in the table are removed; then the quick
start trains two steps, and a run that names the part ends with one line. Prints a JSON object per part.
"""

import compileall
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("bigbatch", "comm", "trainer", "launch", "experiments", "tools", "configs")
TRAINS = (
    *("train", "--config", "quickstart", "--quiet", "--data.loader=synthetic", "--data.num_synthetic_samples=64"),
    *("--data.image_size=16", "--model.options.width=2", "--data.probe_seconds=0", "--run.loggers=[]"),
    *("--batch.global_batch_size=32", "--batch.microbatch_size=16", "--batch.bn_span=16", "--run.epochs=1"),
    *("--run.eval_every_epochs=1", "--schedule.warmup_epochs=0"),
)
LOCAL = ("launch", "local", "--ranks", "1", "--")
OBSERVED = {"run.digest_every_steps": "1", "run.noise_scale_every_steps": "1", "comm.timeline_steps": "[1,1]"}
OBSERVED |= {"run.reproducible": "true", "run.audit_every_steps": "1"}
LAUNCHERS = "launch/launchers/registry.py"
KEYS = {
    # table: the key that its names are values of
    "trainer/observe/observer.py": "",
    "trainer/recovery.py": "run.heal",
    "trainer/config/checks.py": "run.loggers",
    "trainer/build/optimizer.py": "optimizer.name",
    "trainer/models/__init__.py": "model.name",
    "trainer/input/loaders/encoded.py": "data.loader",
    "trainer/input/data_root.py": "data.root",
    "comm/connect.py": "comm.backend",
    "comm/algorithms/by_name.py": "comm.algorithm",
    LAUNCHERS: "",
}
DEFAULTS = ("native", "restart", "lars", "resnet9", "torchvision", "local")
"""Names that the quick start itself uses."""
ENTRY = re.compile(r'^    (?:\*\*dict\.fromkeys\()?"([\w.]+)": \(?\s*"bigbatch\.([\w.]+)\.\w+",', re.MULTILINE)
BESIDE = {
    "run.audit_every_steps=1": ("--run.reproducible=true",),
}


@dataclass(frozen=True)
class Part:
    """An entry of a table; others: entries of the same file, which goes with them."""

    table: str
    name: str
    file: str
    others: tuple[str, ...] = field(default=())

    @property
    def naming(self) -> str:
        """The option that names the part; empty if that needs other data, or several ranks."""
        key = KEYS[self.table]
        if not key:
            return f"{self.name}={OBSERVED[self.name]}" if self.name in OBSERVED else ""
        if key in ("data.root", "data.loader", "comm.backend", "comm.algorithm") or self.name == "alexnet_bn":
            return ""
        return f"{key}=[{self.name}]" if key == "run.loggers" else f"{key}={self.name}"


def parts() -> Iterator[Part]:
    """All entries of the tables that the quick start does not use, each file once."""
    for table in KEYS:
        entries = [
            (name, module.replace(".", "/") + ".py") for name, module in ENTRY.findall((ROOT / table).read_text())
        ]
        kept = {file for name, file in entries if name in DEFAULTS} | {table}
        for file in dict.fromkeys(file for _, file in entries if file not in kept):
            first, *others = (name for name, each in entries if each == file)
            yield Part(table, first, file, tuple(others))


def in_child(work: Path, argv: tuple[str, ...]) -> tuple[int, str]:
    """Run bigbatch in a forked process, in a folder of its own; return its exit code and what it printed."""
    output = work / "output.txt"
    if not (child := os.fork()):
        with open(output, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        folder = tempfile.mkdtemp(dir=work)
        code = 70
        try:
            from bigbatch.cli import main

            code = main([*argv, f"--run.directory={folder}/run"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), output.read_text()


def without(part: Part, clone: Path, work: Path) -> dict[str, object]:
    """Remove a part from the clone, try both runs, and put it back."""
    table, file = clone / part.table, clone / part.file
    before, source = table.read_text(), file.read_text()
    names = "|".join(map(re.escape, (part.name, *part.others)))
    file.unlink()
    table.write_text(re.sub(rf'^    "(?:{names})": ("bigbatch[^\n]*|\([^()]*\),)\n', "", before, flags=re.MULTILINE))
    is_launcher = part.table == LAUNCHERS
    try:
        code, said = in_child(work, (*LOCAL, *TRAINS) if is_launcher else TRAINS)
        found: dict[str, object] = {"part": part.name, "file": part.file, "trains": code, "said": said[-400:]}
        if is_launcher:
            code, said = in_child(work, ("launch", part.name, "--dry-run", "--", *TRAINS))
            found |= {"naming": part.name, "code": code, "line": said.strip()[-400:]}
        if part.naming:
            option = f"--{part.naming}"
            words = tuple(word for word in TRAINS if word.partition("=")[0] != option.partition("=")[0])
            code, said = in_child(work, (*words, *BESIDE.get(part.naming, ()), option))
            found |= {"naming": part.naming, "code": code, "line": said.strip()[-400:]}
    finally:
        file.write_text(source)
        table.write_text(before)
    return found


def main() -> None:
    # every child uses these: imported once
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import rich.progress  # noqa: F401
    import torch
    import torchvision.transforms  # noqa: F401

    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as folder:
        clone, work = Path(folder, "clone"), Path(folder, "work")
        work.mkdir()
        for room in ROOMS:
            shutil.copytree(ROOT / room, clone / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(clone, quiet=2)  # a child would spend a third of its time on it
        sys.path.insert(0, str(clone))
        os.chdir(work)
        os.environ |= {"BIGBATCH_SITE_FILE": "", "PYTHONPATH": str(clone)}
        for part in parts():
            print(json.dumps(without(part, clone, work)), flush=True)


if __name__ == "__main__":
    main()
