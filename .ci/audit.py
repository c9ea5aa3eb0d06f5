"""Look up what constraints.txt pins for this Python among the vulnerabilities that PyPI knows, by pip-audit.

usage: audit.py    exit code 0: none is known; 1: the named ones are; 77: not everything could be looked up
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from venv import EnvBuilder

PINNED = Path(__file__).parents[1] / "constraints.txt"
NOT_DONE = 77


def verdict(dependencies: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """Return the exit code and what to print, of pip-audit's findings; of none, nothing was looked up."""
    known = [
        f"{each['name']} {each['version']}: {found['id']}, mended in {', '.join(found['fix_versions']) or 'no version'}"
        for each in dependencies
        for found in each.get("vulns", [])
    ]
    if known:
        return 1, known
    missed = [str(each["name"]) for each in dependencies if "skip_reason" in each]
    if missed or not dependencies:
        of = f"{len(missed)} packages, such as {missed[0]}" if missed else "any package"
        return NOT_DONE, [f"audit: what PyPI knows of vulnerabilities cannot be had here of {of}"]
    return 0, [f"audit: no vulnerability is known of {len(dependencies)} packages"]


def findings(folder: Path) -> list[dict[str, Any]]:
    """Return what a pip-audit that is installed into folder finds; nothing without a network.

    Raises: SystemExit where a file is not the one that constraints.txt names.
    """
    EnvBuilder().create(folder)
    pip = [sys.executable, "-m", "pip", "--python", f"{folder}/bin/python", "install", "--quiet", "--no-require-hashes"]
    installed = subprocess.run([*pip, "-c", str(PINNED), "pip-audit"], text=True, stderr=subprocess.PIPE)
    if installed.returncode:
        print(installed.stderr, file=sys.stderr)
        if "DO NOT MATCH THE HASHES" in installed.stderr:
            raise SystemExit(1)
        return []
    audit = [f"{folder}/bin/pip-audit", "--requirement", str(PINNED), "--no-deps", "--disable-pip", "--format", "json"]
    done = subprocess.run([*audit, "--progress-spinner", "off"], text=True, capture_output=True)
    if not done.stdout:
        print("\n".join(done.stderr.splitlines()[-3:]), file=sys.stderr)
        return []
    return json.loads(done.stdout)["dependencies"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        code, lines = verdict(findings(Path(temporary)))
    print("\n".join(lines))
    sys.exit(code)
