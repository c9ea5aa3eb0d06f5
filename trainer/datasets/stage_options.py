"""`bigbatch data stage`: packed shards to the disk or memory of a node."""

import argparse
import json
import os
import sys
from dataclasses import asdict

from bigbatch.errors import print_line
from bigbatch.numbers import whole
from bigbatch.paths import as_path

_EXAMPLES = """examples:
  bigbatch data stage data/imagenet-packed /scratch/imagenet     a disk of the node
  bigbatch data stage data/imagenet-500 /dev/shm/imagenet        its memory, which all ranks of the node then share
on every node of a job, before the training in the same job:
  srun --ntasks-per-node=1 bigbatch data stage data/imagenet-packed /scratch/imagenet
Every process of a node may call it, too: one copies, the others wait for its end."""


def add_stage(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `stage`."""
    stage = commands.add_parser(
        "stage",
        help="copy packed shards to a disk or the memory of this node",
        description="Copy the packed data set SRC to the folder DST near the GPUs, and compare every byte with its "
        "SHA-256\non the way; data.root then takes DST. An interrupted copy is gone on with: give the same command "
        "again.\nA DST that is complete is left as it is.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stage.add_argument("source", type=as_path, metavar="SRC", help="DST of `bigbatch data pack`")
    stage.add_argument("target", type=as_path, metavar="DST", help="folder to write, such as /scratch/imagenet")
    threads = min(16, os.cpu_count() or 1)  # each hashes; more streams than that hold no server's attention
    stage.add_argument("--workers", type=whole, default=threads, help="threads that copy (default: %(default)s)")
    stage.add_argument("--json", action="store_true", help="print what was done as one line of JSON")
    stage.set_defaults(run=_stage)


def _stage(arguments: argparse.Namespace) -> int:
    from bigbatch.trainer.datasets.show_progress import show_progress
    from bigbatch.trainer.datasets.stage import stage
    from bigbatch.trainer.input.base import written_keys

    target = arguments.target
    with show_progress(f"staging {target}", unit="MB") as on_progress:
        summary = stage(
            arguments.source,
            target,
            num_workers=arguments.workers,
            on_progress=lambda done, total: on_progress(_megabytes(done), _megabytes(total)),
            on_wait=lambda: print_line(f"waiting for another process, which stages into {target}", file=sys.stderr),
        )
    if arguments.json:
        facts = asdict(summary, dict_factory=written_keys)
        print(json.dumps({"root": str(target), **facts, "gb_per_s": summary.gb_per_s}))
    else:
        print_line(f"{target}: {summary}")
        print_line(f"in the config: data.root: {target}")
    return 0


def _megabytes(num_bytes: int) -> int:
    """Return megabytes rounded up, so that a small data set has some, too."""
    return -(-num_bytes // 10**6)
