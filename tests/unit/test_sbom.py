"""The list of an image's packages: .ci/sbom.py."""

import json
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci/sbom.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The script's names, on a Debian whose dpkg knows two packages."""
    module = runpy.run_path(str(SCRIPT))
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
    command = [sys.executable, str(SCRIPT)]
    first, second = (subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2))
    assert first == second
    assert len(json.loads(first)["components"]) > 100
