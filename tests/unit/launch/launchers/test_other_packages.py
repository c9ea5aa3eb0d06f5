"""A launcher of a package outside of the project: the one that docs/jobs.md shows, found by its entry point."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from own_imports import ROOT

from bigbatch.comm.rendezvous.ports import free_port

SOURCE = re.search(r"^```python\n(.*?)^```$", (ROOT / "docs/jobs.md").read_text(), re.M | re.S)
ACME_RUN = """\
#!/bin/sh
n=$2; shift 2; rank=1
export WORLD_SIZE=$n LOCAL_WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 MASTER_PORT={port}
while [ $rank -lt $n ]; do RANK=$rank LOCAL_RANK=$rank "$@" & rank=$((rank + 1)); done
RANK=0 LOCAL_RANK=0 "$@"
"""
SCRIPT = """\
import os, sys, torch, bigbatch
with bigbatch.connect() as job:
    total = bigbatch.all_reduce(torch.ones(()), job, op="sum")
    print(f"{os.environ['OWN']} {total:.0f}\\n", end="")
sys.exit(7)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the package's module, in which the job also works; its metadata: entry_points()."""
    assert SOURCE is not None
    (tmp_path / "acme_launcher.py").write_text(SOURCE[1])
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "acme-run").write_text(ACME_RUN.format(port=free_port()))
    (tmp_path / "acme-run").chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    entry_points(tmp_path, "acme = acme_launcher:LAUNCHER")
    return tmp_path


def entry_points(folder: Path, *lines: str) -> None:
    info = folder / "acme_tools-1.2.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tools\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("\n".join(("[bigbatch.launchers]", *lines, "")))


def bigbatch(*words: str, cwd: Path) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "bigbatch", *words], cwd=cwd, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_launcher_of_another_package_is_listed_shown_and_starts_ranks(package: Path) -> None:
    assert re.search(r"\n    acme +launcher of the package acme-tools\n", bigbatch("launch", "--help", cwd=package)[1])
    assert " acme " in bigbatch("completion", "bash", cwd=package)[1]
    assert "--ranks RANKS" in bigbatch("launch", "acme", "--help", cwd=package)[1]
    words = ("launch", "acme", "--ranks", "2", "--device", "cpu", "--env", "OWN=1.5")
    code, shown, _ = bigbatch(*words, "--dry-run", "--", "train", "--config", "quickstart", cwd=package)
    assert (code, shown.endswith("-m bigbatch train --config quickstart\n")) == (0, True)
    assert "OWN=1.5 acme-run -n 2" in shown
    assert bigbatch(*words, "--python", "--", "job.py", cwd=package)[:2] == (7, "1.5 2\n" * 2)


def test_launcher_of_another_package_need_not_refuse_options_itself(package: Path) -> None:
    words = ("launch", "acme", "--time", "5", "--namespace", "vision", "--", "train", "--config", "quickstart")
    code, _, said = bigbatch(*words, cwd=package)
    assert code == 2
    assert "--time: bigbatch launch acme does not support it; leave it out" in said
    assert "--namespace: bigbatch launch acme does not support it" in said
    code, _, said = bigbatch("launch", "status", "--launcher", "acme", "7", cwd=package)
    assert (code, said.count("\n")) == (1, 1)
    assert "--launcher acme has no queue" in said


@pytest.mark.parametrize(
    ("line", "command", "told"),
    [
        ("acme = acme_missing:LAUNCHER", "acme", "No module named 'acme_missing'"),
        ("acme = acme_launcher:start", "acme", "start must be a bigbatch.launch.launchers.base.Launcher"),
        ("acme = acme_launcher:OTHER", "acme", "loading acme_launcher:OTHER fails: AttributeError"),
        (
            "acme = acme_launcher:LAUNCHER",
            "acne",
            "bigbatch launch acne: acne is not one of local, mpirun, torchrun, slurm, flux, k8s, acme",
        ),
    ],
)
def test_launcher_that_cannot_be_used_is_refused_in_one_line(line: str, command: str, told: str, package: Path) -> None:
    entry_points(package, line)
    code, shown, said = bigbatch("launch", command, cwd=package)
    assert (code, shown, said.count("\n")) == (2, "", 1)
    assert told in said
    assert bigbatch("--help", cwd=package)[0] == 0


@pytest.mark.parametrize("name", ["local", "status", "a b", "../x", "Acme"])
def test_launcher_whose_name_is_taken_or_no_word_is_named_and_not_used(name: str, package: Path) -> None:
    entry_points(package, f"{name} = acme_launcher:LAUNCHER")
    code, shown, said = bigbatch("launch", "--help", cwd=package)
    assert (code, said.count("\n"), "acme-tools" in shown) == (0, 1, False)
    assert f"package acme-tools adds a launcher by the name {name!r}, which is not used: rename" in said
    words = ("local", "--dry-run", "--", "train", "--config", "quickstart")
    code, _, said = bigbatch("launch", *words, cwd=package)
    assert (code, "acme-tools" in said) == (0, False)


@pytest.mark.parametrize(
    "value", ["acme_launcher:OWN.LAUNCHER", "acme_launcher : LAUNCHER", "acme_launcher:LAUNCHER [x]"]
)
def test_launcher_is_found_by_every_form_of_an_entry_point(value: str, package: Path) -> None:
    with (package / "acme_launcher.py").open("a") as file:
        file.write("class OWN:\n    LAUNCHER = LAUNCHER\n")
    entry_points(package, f"acme = {value}")
    assert "usage: bigbatch launch acme" in bigbatch("launch", "acme", "--help", cwd=package)[1]


def test_packages_with_odd_metadata_leave_the_other_launchers_alone(package: Path) -> None:
    info = package / "acme_tools-1.2.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ev%(x)s\x1b[31m\nVersion: 1.2\n")
    code, shown, said = bigbatch("launch", "--help", cwd=package)
    assert (code, said) == (0, "")
    assert "launcher of the package ev%(x)s\\x1b[31m" in shown
    for damaged in (b"\xff\xfe\x00[", b"[bigbatch.launchers]\nno value\n"):
        (info / "entry_points.txt").write_bytes(damaged)
        code, _, said = bigbatch("launch", "--help", cwd=package)
        assert (code, said.count("\n")) == (0, 1)
        assert "the entry points of installed packages cannot be read: " in said


def test_launcher_that_is_not_named_is_not_imported(package: Path) -> None:
    (package / "acme_launcher.py").write_text("1 / 0\n")
    for words in (("--help",), ("local", "--dry-run", "--", "train", "--config", "quickstart")):
        assert bigbatch("launch", *words, cwd=package)[0] == 0
    code, _, said = bigbatch("launch", "acme", cwd=package)
    assert (code, said.count("\n")) == (2, 1)
    assert "acme (launcher of the package acme-tools): loading acme_launcher:LAUNCHER fails: ZeroDivisionError" in said
