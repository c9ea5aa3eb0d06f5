"""CI's scripts: audit, keep_base, sbom and twice."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

verdict = runpy.run_path(str(Path(__file__).parents[2] / ".ci/audit.py"))["verdict"]
SOUND = {"name": "torch", "version": "2.14.1", "vulns": []}
HOLED = {"name": "pillow", "version": "10.0.0", "vulns": [{"id": "PYSEC-2023-175", "fix_versions": ["10.0.1"]}]}
UNMENDED = {"name": "six", "version": "1.17.0", "vulns": [{"id": "PYSEC-2026-1", "fix_versions": []}]}
MISSED = {"name": "numpy", "skip_reason": "Dependency not found on PyPI and could not be audited: numpy (2.4.6)"}


@pytest.mark.parametrize(
    ("dependencies", "code", "named"),
    [
        ([SOUND], 0, ["1 packages"]),
        ([SOUND, HOLED], 1, ["pillow 10.0.0", "PYSEC-2023-175", "10.0.1"]),
        ([UNMENDED, MISSED], 1, ["six 1.17.0", "PYSEC-2026-1", "no version"]),
        ([SOUND, MISSED], 77, ["cannot be had", "1 packages", "numpy"]),
        ([], 77, ["cannot be had", "any package"]),
    ],
    ids=[
        "none is known",
        "one is known",
        "one is known, others are not looked up",
        "one is not looked up",
        "no network",
    ],
)
def test_audit_fails_by_what_is_known_and_passes_by_nothing_less_than_all(
    dependencies: list[dict[str, Any]], code: int, named: list[str]
) -> None:
    given, lines = verdict(dependencies)
    assert given == code
    assert all(word in "\n".join(lines) for word in named), lines


KEEP_BASE = Path(__file__).parents[2] / ".ci/keep_base.py"


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (
            {},
            [
                "nvidia-nccl-cu13==2.30.7 \\",
                "    --hash=sha256:1",
                "numpy==2.4.6; python_version >= '3.11'",
                "torch==2.14.1 \\",
                "    --hash=sha256:2 \\",
                "    --hash=sha256:3",
                "onnx_ir==1.1.0",
            ],
        ),
        (
            {"torch": "2.15.0a0+nv26.10", "numpy": "1.26.4", "onnx-ir": "1.0.0"},
            ["nvidia-nccl-cu13==2.30.7 \\", "    --hash=sha256:1", "torch==2.15.0a0+nv26.10"],
        ),
    ],
    ids=["bare base", "base with a torch of its own"],
)
def test_keep_base_keeps_what_the_base_brings(present: dict[str, str], expected: list[str]) -> None:
    pinned = [
        "# every version that was tried together\n",
        "nvidia-nccl-cu13==2.30.7 \\\n",
        "    --hash=sha256:1\n",
        "numpy==2.4.6; python_version >= '3.11'\n",
        "torch==2.14.1 \\\n",
        "    --hash=sha256:2 \\\n",
        "    --hash=sha256:3\n",
        "onnx_ir==1.1.0\n",
    ]
    assert runpy.run_path(str(KEEP_BASE))["constraints"](pinned, present) == expected


def test_keep_base_sees_the_packages_of_the_python_that_runs_it(tmp_path: Path) -> None:
    pinned = tmp_path / "constraints.txt"
    pinned.write_text("torch==0.0.1\npytest==0.0.1\nno-such-package==0.0.1\n")
    command = [sys.executable, str(KEEP_BASE), str(pinned)]
    printed = subprocess.run(command, text=True, capture_output=True, check=True).stdout.splitlines()
    assert printed == ["no-such-package==0.0.1", f"torch=={version('torch')}", f"torchvision=={version('torchvision')}"]


SBOM = Path(__file__).parents[2] / ".ci/sbom.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The script's names, on a Debian whose dpkg knows two packages."""
    module = runpy.run_path(str(SBOM))
    monkeypatch.setattr(module["platform"], "freedesktop_os_release", lambda: {"ID": "debian", "VERSION_ID": "12"})
    said = "libc6 2.36-9+deb12u9 amd64\nlibcap2 1:2.66-4 amd64\n"
    monkeypatch.setattr(
        module["subprocess"], "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=said, stderr="")
    )
    return module


def test_bill_names_each_package_as_scanners_do(script: dict[str, Any]) -> None:
    found = {each["purl"]: each for each in script["bill"]()["components"]}
    # https://github.com/package-url/purl-spec: an epoch's colon and a plus are quoted, pypi's names are lower case
    assert found["pkg:deb/debian/libc6@2.36-9%2Bdeb12u9?arch=amd64&distro=debian-12"]["version"] == "2.36-9+deb12u9"
    assert found["pkg:deb/debian/libcap2@1%3A2.66-4?arch=amd64&distro=debian-12"]["name"] == "libcap2"
    torch = version("torch")
    assert found[f"pkg:pypi/torch@{torch.replace('+', '%2B')}"]["version"] == torch
    assert f"pkg:pypi/pyyaml@{version('PyYAML')}" in found


def test_bill_is_a_document_of_cyclonedx(script: dict[str, Any]) -> None:
    """Checked against what its schema requires: https://cyclonedx.org/docs/1.6/json."""
    bill = script["bill"]()
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["version"] == version("bigbatch")
    references = [each["bom-ref"] for each in bill["components"]]
    assert len(set(references)) == len(references)
    for each in bill["components"]:
        assert each["type"] == "library"
        assert each["name"]


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="no dpkg here")
def test_bill_is_the_same_each_time() -> None:
    command = [sys.executable, str(SBOM)]
    first, second = (subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2))
    assert first == second
    assert len(json.loads(first)["components"]) > 100


TWICE = Path(__file__).parents[2] / ".ci/twice"
PASSES_LATER = """
from pathlib import Path
def test_unsteady():
    mark = Path(__file__).with_suffix(".ran")
    ran_before = mark.exists()
    mark.touch()
    assert ran_before
"""
MANY = """
import pytest
@pytest.mark.parametrize("k", range(9))
def test_many(k, request):
    mark = request.path.with_suffix(f".ran{k}")
    ran_before = mark.exists()
    mark.touch()
    assert ran_before
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        (PASSES_LATER, 0, "test_it.py::test_unsteady\n"),
        pytest.param("def test_broken():\n    assert 0", 1, "", marks=pytest.mark.long),
        (MANY, 1, ""),
        pytest.param("import nothing_of_this_name", 2, "", marks=pytest.mark.long),
    ],
    ids=["unsteady", "broken", "many", "no tests"],
)
def test_a_few_that_failed_run_again(text: str, code: int, named: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(text)
    unsteady = tmp_path / "unsteady"
    unsteady.touch()
    argv = [str(TWICE), "--rootdir", str(tmp_path), "-c", os.devnull, str(tmp_path)]
    environ = os.environ | {"PYTHON": sys.executable, "UNSTEADY": str(unsteady)}
    environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist"}  # others take half of its time
    done = subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert unsteady.read_text() == named


ROOT = Path(__file__).parents[2]
COMPILED = (ROOT / "Dockerfile").read_text().partition(" AS compiled\n")[2].partition("\nFROM ")[0]
"""The stage of the image that compiles Horovod and apex."""
APEX = "pip wheel --no-cache-dir --no-deps --no-build-isolation -w wheels git+https://github.com/NVIDIA/apex@"
COMMIT = re.search(r"^ARG APEX_COMMIT=([0-9a-f]{40})$", COMPILED, re.MULTILINE)[1]  # type: ignore[index]


def stub(folder: Path, *names: str) -> Path:
    """Make commands that print their words."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text('#!/bin/sh\necho "${0##*/} $*"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "said", "unsaid"),
    [
        ({}, 0, (), ("apt-get", "pip")),
        ({"HOROVOD": "2"}, 1, ("HOROVOD is 0 or 1, not 2",), ("apt-get",)),
        ({"HOROVOD": "1"}, 0, ("apt-get install", "script wheels"), ("apex",)),
        ({"APEX": "1"}, 0, ("apt-get install", APEX + COMMIT), ("script",)),
        ({"APEX": "0123abc", "HOROVOD": "1"}, 0, ("script wheels", APEX + "0123abc"), ()),
    ],
)
def test_image_compiles_what_is_asked_for(
    arguments: dict[str, str], code: int, said: tuple[str, ...], unsaid: tuple[str, ...], tmp_path: Path
) -> None:
    commands = COMPILED[COMPILED.index("RUN ") + 4 :].rpartition("\n\n")[0].replace("/wheels", "wheels")
    (tmp_path / "build_horovod.sh").write_text('echo "script $*"\n')
    folder = stub(tmp_path / "bin", "apt-get", "pip", "sed", "nvcc")
    env = {"HOROVOD": "0", "APEX": "0", "APEX_COMMIT": COMMIT} | arguments | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", commands], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert [text for text in said if text not in done.stdout] == []
    assert [text for text in unsaid if text in done.stdout] == []


def test_apex_s_commit_is_that_of_the_page() -> None:
    assert f"git+https://github.com/NVIDIA/apex@{COMMIT}" in (ROOT / "docs/compare.md").read_text()


def test_horovod_is_patched_by_one_script_which_dockerfile_error_and_page_name(tmp_path: Path) -> None:
    name = "examples/build_horovod.sh"
    texts = {path: (ROOT / path).read_text() for path in ("Dockerfile", "docs/compare.md", "comm/backends/horovod.py")}
    assert [path for path, text in texts.items() if name not in text or "CMAKE_CXX_STANDARD" in text] == []
    # a python that brings the sources and keeps what it is given to build
    folder = stub(tmp_path / "bin", "nproc")
    (folder / "python").write_text(f"""#!/bin/sh
case "$*" in
  *"pip download"*) cat >{tmp_path}/asked; mkdir -p a/horovod/torch
    for file in CMakeLists.txt horovod/torch/CMakeLists.txt; do echo 'set(CMAKE_CXX_STANDARD 14)' >a/$file; done
    tar cf horovod-0.28.1.tar.gz a ;;
  *"pip wheel"*) cat CMakeLists.txt horovod/torch/CMakeLists.txt; echo "$* MPI=$HOROVOD_WITH_MPI" ;;
  *) exit 1 ;; # torch has no CUDA
esac
""")
    (folder / "python").chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", ROOT / name, tmp_path], env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    patched, again, built = done.stdout.splitlines()
    assert (patched, again) == ("set(CMAKE_CXX_STANDARD 20)",) * 2
    assert built.endswith(f"-w {tmp_path} . MPI=1")
    assert re.fullmatch(r"horovod==0\.28\.1 --hash=sha256:[0-9a-f]{64}\n", (tmp_path / "asked").read_text())
