"""Is the fastest algorithm among the best few that `comm tune` would measure? By recorded sums, size by size.

    python -m benchmarks.twin.ranking            # benchmarks/results/comm-*.json, a second

The model of each cluster has the rate that its record measured between nodes, and for a message's latency what
configs/clusters/emulated.yaml states, with what the record's name adds to it (500us). Nothing is fitted to sums. Small
differences count, too: the loss says what it costs to measure the best few alone.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import mean

from bigbatch.comm.gradients.fusion import DEFAULT_SIZES, TensorSpec
from bigbatch.comm.tuning.cost_model import MODELS, LinkModel
from bigbatch.comm.tuning.plan_search import Backward
from bigbatch.comm.tuning.ranking import Ranking, cluster_model, rank
from bigbatch.launch.simulate.cluster import load_cluster

RESULTS = Path(__file__).parents[1] / "results"
COUNTS = (1, 2, 3)
LEAST_MEASURED = 3
"""Algorithms with a closed form, below which a size says nothing: those that tuning gave up there are missing."""


@dataclass(frozen=True)
class Found:
    """One size of one record, by how many are measured."""

    losses: Mapping[int, float]
    """How much longer the fastest of so many best takes than the fastest of all: 0 where it is among them."""
    num_measured: Mapping[int, int]
    """Those that the model cannot tell apart count, too."""


def ranking_of(record: Mapping[str, object]) -> Ranking:
    """Rank the algorithms on the record's cluster; backends of these records sum in a node's shared memory."""
    stated = load_cluster("emulated").network
    added = re.search(r"-(\d+)us", str(record["case"]))
    latency = stated.constants.across_latency_seconds + (int(added[1]) * 1e-6 if added else 0.0)
    bits: Sequence[float] = record["goodput_bits_per_second"]  # type: ignore[assignment]
    cluster = cluster_model(
        record["conditions"]["groups"],  # type: ignore[index]
        inside=LinkModel(stated.constants.across_latency_seconds, stated.inside_bytes_per_second),
        across=LinkModel(latency, mean(bits) / 8),
    )
    assert cluster is not None
    one, at_the_end = (TensorSpec("all", 1000, 4, "float32"),), Backward({"all": 0.0}, 0.0)
    return rank(cluster, one, at_the_end, algorithms=tuple(MODELS), stated=DEFAULT_SIZES, shares_memory=True)


def compare(ranking: Ranking, times: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Found]:
    """Hold the order against the medians of each size."""
    found = []
    for size, at_size in times.items():
        medians = {name: each["median"] for name, each in at_size.items() if name in MODELS}
        if len(medians) < LEAST_MEASURED:
            continue
        kept = {count: ranking.worth_measuring(int(size), list(MODELS), count=count) for count in COUNTS}
        fastest = {
            count: min((medians[name] for name in names if name in medians), default=inf)
            for count, names in kept.items()
        }
        losses = {count: seconds / min(medians.values()) - 1 for count, seconds in fastest.items()}
        found.append(Found(losses, {count: len(names) for count, names in kept.items()}))
    return found


def read(folder: Path) -> dict[str, list[Found]]:
    """Compare each record that has times of sums in fp32."""
    found = {}
    for path in sorted(folder.glob("comm-*.json")):
        record = json.loads(path.read_text())
        times = next((each["times"] for each in record.get("tuned", {}).values() if "times" in each), None)
        if times:
            found[record["case"]] = compare(ranking_of(record), times)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each record, and one for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of records (default: this one's)")
    records = read(parser.parse_args(argv).results)
    records["all"] = [each for found in records.values() for each in found]
    print(f"{'best 1, 2, 3 of 4':<30} sizes  fastest among them    largest loss  algorithms measured")
    for name, rows in records.items():
        hits = _row([f"{sum(not each.losses[count] for each in rows):5d}" for count in COUNTS])
        losses = _row([f"{max((each.losses[count] for each in rows), default=0):5.0%}" for count in COUNTS])
        counts = _row([f"{mean([each.num_measured[count] for each in rows] or [0]):5.1f}" for count in COUNTS])
        print(f"{name:<30} {len(rows):5d}  {hits}  {losses}  {counts}")


def _row(cells: Sequence[str]) -> str:
    return " ".join(cells)


if __name__ == "__main__":
    main()
