"""A small sweep as its file says it, for tests of sweeps."""

from pathlib import Path
from typing import Any

import yaml

from bigbatch.experiments.engine.folder import SweepFolder

SWEEP: dict[str, Any] = {
    "name": "small",
    "config": "quickstart",
    "options": {
        "data.loader": "synthetic",
        "schedule.warmup_epochs": 0,
        "batch.global_batch_size": 96,
        "batch.microbatch_size": 32,
        "batch.bn_span": 16,
    },
    "steps": 10,
    "where": "local",
    "launch": {},
    "ranks_per_node": 2,
    "grid": {"scaling": ["weak", "strong"], "ranks": [1, 2, 4]},
    "seeds": 1,
    "timeout_minutes": 5,
}

# what the log of a job says of its tries
FIRST = "bigbatch: 2026-11-21 08:20:00 job 7 on n0, restart 0"
ENDED = "bigbatch: 2026-11-21 08:30:41 ended with exit code 0"


def write(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump(SWEEP | changes, sort_keys=False))
    return path


def states(folder: SweepFolder) -> list[str]:
    return [folder.read_state(number)["state"] for number in folder.numbers()]
