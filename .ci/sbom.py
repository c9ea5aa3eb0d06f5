"""The packages of an image as CycloneDX 1.6 JSON, by its Python and by dpkg, for scanners that look for known defects.

usage: sbom.py    run by the image's Python; prints it, the same each time for the same packages
"""

import json
import platform
import subprocess
from importlib.metadata import distributions, version
from typing import Any
from urllib.parse import quote


def python_packages() -> list[dict[str, Any]]:
    """Return what this Python sees; of two of a name, the one that it imports."""
    found = {each.metadata["Name"].lower().replace("_", "-"): each.version for each in reversed(list(distributions()))}
    return [component(name, version, f"pkg:pypi/{name}@{quote(version, safe='')}") for name, version in found.items()]


def debian_packages() -> list[dict[str, Any]]:
    """Return what dpkg has installed; their purl names the distribution and its release."""
    system = platform.freedesktop_os_release()
    shown = ["dpkg-query", "--show", "--showformat", r"${Package} ${Version} ${Architecture}\n"]
    lines = subprocess.run(shown, text=True, capture_output=True, check=True).stdout.splitlines()
    distro = f"{system['ID']}-{system.get('VERSION_ID', '')}"

    def described(name: str, version: str, arch: str) -> dict[str, Any]:
        purl = f"pkg:deb/{system['ID']}/{quote(name)}@{quote(version, safe='')}?arch={arch}&distro={distro}"
        return component(name, version, purl)

    return [described(*line.split()) for line in lines]


def component(name: str, version: str, purl: str) -> dict[str, Any]:
    """Return one package."""
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


def bill() -> dict[str, Any]:
    """Return the whole document."""
    image = {"type": "container", "name": "bigbatch", "version": version("bigbatch"), "bom-ref": "image"}
    components = sorted([*python_packages(), *debian_packages()], key=lambda each: str(each["purl"]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": image},
        "components": components,
    }


if __name__ == "__main__":
    print(json.dumps(bill(), indent=1))
