"""Options of `bigbatch preflight`, which its launcher checks before the job waits in a queue."""

import argparse

from bigbatch.errors import UNFIT
from bigbatch.paths import as_path
from bigbatch.words import positive


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of its own options; the experiment's remain."""
    parser = argparse.ArgumentParser(
        prog="bigbatch preflight",
        usage="bigbatch preflight [OPTION ...] [--config EXPERIMENT [--section.key VALUE ...]]",
        description="Compares the nodes of a job, in less than half a minute: versions, GPUs, disks, images, "
        "connections, matrix multiplication, copies, links. Each rank of the job runs it; bigbatch launch preflight "
        f"starts them. Exit code {UNFIT} if a node is unfit.",
        epilog="example: bigbatch launch preflight --hosts n0:8,n1:8 -- train --config imagenet/resnet50_8k",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--interface", help="network interface between the nodes (default: the launcher's, or the experiment's)")
    add("--bad-nodes", type=as_path, metavar="FILE", help="write the names of unfit nodes there, one a line")
    add("--json", type=as_path, metavar="FILE", help="write all findings there")
    add("--link-gbit", type=positive, metavar="RATE", help="Gbit/s of a node's link, which no card may state")
    return parser
