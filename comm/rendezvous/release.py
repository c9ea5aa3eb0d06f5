"""Which bigbatch a rank runs: the same for all ranks of a job."""

import os
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

import bigbatch
from bigbatch.errors import CommError

UNKNOWN_RELEASE = "an older bigbatch"
"""What a rank runs that does not name its release."""


@cache
def release() -> str:
    """Return versions and a digest of the sources, which tells two checkouts of one version apart."""
    return f"bigbatch {bigbatch.__version__} (sources {sources_digest()}), torch {torch.__version__}"


def sources_digest() -> str:
    """Digest all Python files of the package, wherever it is installed. Takes some milliseconds."""
    root = Path(bigbatch.__file__).parent
    folders = os.walk(root, followlinks=True)  # a checkout's rooms are links
    paths = [Path(folder, name).relative_to(root) for folder, _, names in folders for name in names]
    digest = sha256()
    for path in sorted(path for path in paths if path.suffix == ".py"):
        if not any(part.startswith(".") for part in path.parts):  # what editors and notebooks leave
            digest.update(f"{path.as_posix()} {sha256((root / path).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:8]


def require_same_release(releases: Sequence[str], *, hosts: Sequence[str]) -> None:
    """Compare every rank's release. Raises: CommError naming the hosts that differ from rank 0's, and both releases."""
    first = releases[0]
    odd: dict[str, dict[str, None]] = {}
    for told, host in zip(releases, hosts, strict=True):
        if told != first:
            odd.setdefault(told, {})[host] = None
    if odd:
        named = "; ".join(f"{', '.join(names)}: {told}" for told, names in odd.items())
        raise CommError(
            f"the ranks run different code: {named}; {hosts[0]}: {first}: install the same on all nodes, or once where "
            "all see it"
        )
