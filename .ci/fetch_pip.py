"""Install pip into the virtual environment whose Python runs this: one pinned wheel, checked, installs itself."""

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
PINNED = re.search(r"^pip==(\S+)((?:.*\\\n)*.*)", CONSTRAINTS.read_text(), re.MULTILINE)
assert PINNED, "constraints.txt pins no pip"
NAME = f"pip-{PINNED[1]}-py3-none-any.whl"
INDEX = "https://pypi.org/simple/pip/"


def fetch_wheel() -> bytes:
    """The wheel's bytes. Raises: OSError without a network; ValueError for any other content."""
    link = re.search(rf'href="([^"#]+/{NAME})', urlopen(INDEX, timeout=60).read().decode())
    if not link:
        raise ValueError(f"{INDEX} does not list {NAME}")
    wheel = urlopen(urljoin(INDEX, link[1]), timeout=60).read()
    if f"--hash=sha256:{hashlib.sha256(wheel).hexdigest()}" not in PINNED[2].split():
        raise ValueError(f"{link[1]} is not the file that it should be")
    return wheel


if __name__ == "__main__":
    if sys.prefix == sys.base_prefix:
        sys.exit("run this with the Python of a virtual environment")
    try:
        content = fetch_wheel()
    except (OSError, ValueError) as error:
        sys.exit(f"pip cannot be fetched ({error}): install it by `apt install python3-venv` and try again")
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder, NAME)
        wheel.write_bytes(content)
        # a wheel of pip runs as it is
        command = [sys.executable, f"{wheel}/pip", "install", "--quiet", "--no-index", str(wheel)]
        sys.exit(subprocess.run(command).returncode)
