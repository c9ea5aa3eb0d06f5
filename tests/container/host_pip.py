"""This machine's pip settings for a container build: writes a pip.conf, prints the mounts that it needs.

usage: host_pip.py PIP_CONF    where an index is private, its certificate and its local folders must be seen inside
"""

import ast
import ssl
import subprocess
import sys
from pathlib import Path

KEYS = ("index-url", "extra-index-url", "find-links", "trusted-host", "no-index", "proxy", "timeout", "default-timeout")
CERTIFICATES = "/etc/pip-certificates.pem"


def read_settings() -> dict[str, str]:
    """The settings of files and of PIP_* variables alike; the latter win, wherever a version of pip lists them.

    From 26.3 on pip lists a key of several files as often, the file that wins last.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    files: dict[str, str] = {}
    variables: dict[str, str] = {}
    for line in subprocess.run(command, text=True, capture_output=True, check=True).stdout.splitlines():
        name, _, value = line.partition("=")
        found = variables if name.startswith(":env:") else files
        found[name.rpartition(".")[2]] = " ".join(ast.literal_eval(value).split())
    return files | variables


def local_folders(settings: dict[str, str]) -> list[str]:
    """Folders that the settings name; an index at FOLDER/simple may link to its siblings, so FOLDER then."""
    paths = [Path(word.removeprefix("file://")) for value in settings.values() for word in value.split()]
    folders = [path.parent if path.name == "simple" else path for path in paths if path.is_absolute()]
    return sorted({str(folder) for folder in folders if folder.is_dir()})


def main(conf: Path) -> None:
    """Write conf; print one SOURCE:TARGET:ro a line."""
    settings = read_settings()
    kept = {key.removeprefix("default-"): settings[key] for key in KEYS if key in settings}
    mounts = [f"{conf}:/etc/pip.conf:ro", *(f"{folder}:{folder}:ro" for folder in local_folders(kept))]
    certificates = settings.get("cert") or ssl.get_default_verify_paths().cafile
    if certificates and Path(certificates).is_file():
        kept["cert"] = CERTIFICATES
        mounts.append(f"{certificates}:{CERTIFICATES}:ro")
    conf.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in kept.items()))
    print("\n".join(mounts))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
