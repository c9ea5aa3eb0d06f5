"""Settings of a training that takes seconds, and the command itself in processes of its own."""

import subprocess

from tests.laws.jobs import forked, run

TINY = {
    "data.loader": "synthetic",
    "data.num_synthetic_samples": 64,
    "data.image_size": 16,
    "data.probe_seconds": 0,
    "model.options.width": 2,
    "batch.global_batch_size": 16,
    "batch.microbatch_size": 8,
    "batch.bn_span": 8,
}
"""Settings of a short quick start: four steps an epoch."""
TINY_OPTIONS = [f"--{key}={value}" for key, value in TINY.items()]


def bigbatch(*words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run the command on so many ranks, forked with torch imported, and return its code and what it printed."""
    return run(forked(words, ranks=ranks), expect=None)
