"""Replacement for ssh: `python -m bigbatch.tools.emulate.agent [-OPTION ...] HOST WORD ...`, from inside a node.

Like ssh, it joins the words with blanks and lets the host's shell run them. mpirun (PRRTE) starts its daemons by it.
"""

import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from bigbatch.tools.emulate.namespaces import enter_node

KEEPER = 1
"""Number of the keeper: it is the first process of the cluster's process namespace."""


def split_words(argv: Sequence[str]) -> tuple[int, str]:
    """Return the node's number and the command line. Raises: SystemExit if HOST is not a node of the cluster."""
    words = list(argv)
    # ssh's options have no meaning here: there is no connection
    while words and words[0].startswith("-"):
        del words[0]
    match = re.fullmatch(r"n(\d{1,3})", words[0], re.ASCII) if len(words) > 1 else None
    if not match:
        raise SystemExit("usage: agent [-OPTION ...] HOST WORD ..., where HOST is n0, n1 ...")
    return int(match[1]), " ".join(words[1:])


def main(argv: Sequence[str]) -> NoReturn:
    node, line = split_words(argv)
    enter_node(KEEPER, node)
    os.execv("/bin/sh", ["sh", "-c", line])


if __name__ == "__main__":
    main(sys.argv[1:])
