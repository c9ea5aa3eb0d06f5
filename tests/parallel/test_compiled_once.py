"""Each graph of a job is compiled once on a host, by its first rank."""

import re
from pathlib import Path

import pytest

from tests.laws.jobs import Forked, run, train_command

SETTINGS = {"data.loader": "synthetic", "data.num_synthetic_samples": 64, "compute.compile": "default"}


@pytest.mark.weekly
def test_ranks_of_a_host_compile_each_graph_once(tmp_path: Path) -> None:
    """By the counters of torch's compiler: 94 s for the first start, 7 s of it for the second rank."""
    target = "tests.parallel.counted_compile:bigbatch"
    found = []
    for name in ("first", "second"):
        command = train_command(tmp_path, tmp_path / name, SETTINGS)
        done = run(Forked(tuple(command), 2, target), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        ranks = sorted(re.findall(r"^([01]) (\d+) (\d+)$", done.stderr, re.MULTILINE))
        found += [(int(hits), int(misses)) for _, hits, misses in ranks]
    (hits, num_graphs), *others = found
    assert hits == 0
    assert num_graphs > 10
    assert others == [(num_graphs, 0)] * 3
