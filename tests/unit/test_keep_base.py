"""What a container build on another base image may install: .ci/keep_base.py."""

import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci/keep_base.py"


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
    assert runpy.run_path(str(SCRIPT))["constraints"](pinned, present) == expected


def test_keep_base_sees_the_packages_of_the_python_that_runs_it(tmp_path: Path) -> None:
    pinned = tmp_path / "constraints.txt"
    pinned.write_text("torch==0.0.1\npytest==0.0.1\nno-such-package==0.0.1\n")
    command = [sys.executable, str(SCRIPT), str(pinned)]
    printed = subprocess.run(command, text=True, capture_output=True, check=True).stdout.splitlines()
    assert printed == ["no-such-package==0.0.1", f"torch=={version('torch')}", f"torchvision=={version('torchvision')}"]
