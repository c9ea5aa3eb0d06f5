"""The simulator against emulated clusters: 2, 4 and 8 ranks on 1, 2 and 4 nodes, two rates, both ways to place them.

    python -m benchmarks.twin.emulated --out benchmarks/results/simulate-emulated.json       # about seven minutes

Steps on one and two nodes calibrate four numbers, the same for all (latency and bandwidth inside a node, latency and
share of the stated rate between nodes); those on four nodes are then predicted. Beside the prediction stand two that
know no network: linear, a step takes what it takes on one node with as many ranks each; and line, a straight line in
the number of nodes through one and two. Bytes and messages between nodes are predicted from sizes and places alone,
and must equal what the kernel counted in the ranks' streams (tcpi_bytes_received: no headers, no acknowledgements).

Leave the machine alone meanwhile. Needs what `bigbatch launch emulate` needs.
"""

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import conditions, write_record
from benchmarks.twin.emulated_rank import ALGORITHMS, LOCAL
from benchmarks.twin.traffic import node_traffic, stream_bytes
from bigbatch.comm.algorithms.ring import SEGMENT_BYTES
from bigbatch.comm.gradients.fusion import PlanSizes
from bigbatch.tools.emulate.plan import parse_rate
from bigbatch.tools.simulate.constants import BACKWARD_SHARE, DEFAULTS
from bigbatch.tools.simulate.network import Network
from bigbatch.tools.simulate.shapes import ModelShape, shape_of
from bigbatch.tools.simulate.step import Compute, SimulatedJob
from bigbatch.tools.simulate.traffic import Traffic
from bigbatch.trainer.config.sections import ModelConfig

SHAPE = shape_of(ModelConfig(name="resnet9", options={"width": 24}))
"""Model of the gradients: 0.93 million in fp32. Links limit its steps; two cores could not sum larger gradients."""
SIZES = PlanSizes(threshold_bytes=500_000, buffer_bytes=500_000)
STEP_SECONDS = 0.3
"""Seconds of forward and backward."""
RATES = ("25mbit", "100mbit")
TIMEOUT_SECONDS = 300
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Case:
    """One cluster: its nodes, ranks on each, the rate between them, and the placement of ranks."""

    num_nodes: int
    ranks_per_node: int
    link: str
    place: str

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        return f"{self.world_size} on {self.num_nodes}, {self.link}, {self.place}"


@dataclass(frozen=True)
class Links:
    """Calibrated values: seconds and bytes per second inside a node, seconds and a share of the rate between nodes."""

    inside_seconds: float = 1e-4
    inside_bytes_per_second: float = 1e9
    across_seconds: float = 3e-4
    across_share: float = 0.9


def cases(rates: Sequence[str] = RATES) -> list[Case]:
    """List the cases; one node has no link, and one rank per node has only one placement."""
    found = [Case(1, ranks, "none", "block") for ranks in (1, 2, 4, 8)]
    for link, nodes, world in itertools.product(rates, (2, 4), (2, 4, 8)):
        each = world // nodes
        found += [Case(nodes, each, link, place) for place in ("block", "cyclic")[: min(each, 2)]]
    return found


def measure(case: Case, *, repetitions: int, shape: ModelShape = SHAPE, seconds: float = STEP_SECONDS) -> Any:
    """Run the case on an emulated cluster; return the record of its rank 0. Raises: RuntimeError if it fails."""
    job = {
        "elements": shape.num_elements,
        "ready_shares": shape.ready_shares,
        "sizes": asdict(SIZES),
        "forward_seconds": (1 - BACKWARD_SHARE) * seconds,
        "backward_seconds": BACKWARD_SHARE * seconds,
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rank0.json")
        emulate = ["launch", "emulate", "run", "--nodes", f"{case.num_nodes}", "--link", case.link]
        emulate += ["--ranks-per-node", f"{case.ranks_per_node}", "--place", case.place, "--launcher", "plain"]
        rank = ["--python", "--", "-m", "benchmarks.twin.emulated_rank", "--job", json.dumps(job)]
        rank += ["--repetitions", f"{repetitions}", "--out", str(out)]
        command = [sys.executable, "-m", "bigbatch", *emulate, *rank]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        if done.returncode:
            raise RuntimeError(f"{case.name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        return json.loads(out.read_text())


def simulated_seconds(case: Case, algorithm: str, links: Links, *, computing: float) -> float:
    constants = replace(
        DEFAULTS,
        inside_latency_seconds=links.inside_seconds,
        across_latency_seconds=links.across_seconds,
        straggler_share=0.0,  # a sleeping rank is never late, and reads no images
        input_share=0.0,
    )
    rate = parse_rate(case.link) or math.inf
    network = Network(
        case.num_nodes,
        case.ranks_per_node,
        links.inside_bytes_per_second,
        links.across_share * rate / 8,
        constants=constants,
    )
    job = SimulatedJob(SHAPE, network, SIZES, algorithm=algorithm)
    return job.simulate(Compute(computing, 0.0), 1).seconds


def calibrate(points: Mapping[tuple[Case, str], float], *, computing: float) -> Links:
    """Return the four numbers with the least squared logarithms of errors, searched in turn in ever finer steps."""

    def badness(links: Links) -> float:
        return sum(
            math.log(simulated_seconds(case, name, links, computing=computing) / seconds) ** 2
            for (case, name), seconds in points.items()
        )

    best, least = Links(), math.inf
    factor = 2.0
    while factor > 1.001:
        tried = [best, *_neighbours(best, factor)]
        found = min(tried, key=badness)
        factor = factor**0.5 if badness(found) > 0.99 * least - 1e-6 else factor
        best, least = found, badness(found)
    return best


def _neighbours(links: Links, factor: float) -> list[Links]:
    return [
        replace(links, **{name: value * each}) for name, value in vars(links).items() for each in (factor, 1 / factor)
    ]


def predicted_traffic(
    groups: Sequence[Sequence[int]], algorithm: str, shape: ModelShape = SHAPE
) -> dict[tuple[int, int], Traffic]:
    """Return what a step sends from node to node, over all buffers of the fusion plan."""
    total: dict[tuple[int, int], Traffic] = {}
    for buffer in SIZES.plan(shape.tensors(ELEMENT_BYTES)).buffers:
        counted = node_traffic(
            algorithm, buffer.num_elements, element_bytes=ELEMENT_BYTES, groups=groups, segment_bytes=SEGMENT_BYTES
        )
        for way, each in counted.items():
            total[way] = total.get(way, Traffic()) + each
    return total


def counted_bytes(record: Mapping[str, Any], algorithm: str) -> dict[tuple[int, int], int]:
    """Return the bytes of one step between nodes, as the kernels of their ranks counted them."""
    node_of = {rank: node for node, ranks in enumerate(record["groups"]) for rank in ranks}
    total: dict[tuple[int, int], int] = {}
    for receiver, peers in record["received_bytes"][algorithm].items():
        for sender, num_bytes in peers.items():
            way = node_of[int(sender)], node_of[int(receiver)]
            if way[0] != way[1] and num_bytes:
                total[way] = total.get(way, 0) + num_bytes
    return total


def compare(records: Mapping[Case, Mapping[str, Any]]) -> tuple[Links, float, list[dict[str, Any]]]:
    """Return links and seconds of computing, calibrated on one and two nodes, and a row per case and algorithm."""
    seconds = {
        (case, name): record["seconds"][name]["median"] for case, record in records.items() for name in ALGORITHMS
    }
    # a step without communication takes the same time on any cluster; a single rank has no other steps
    computing = median(record["seconds"][LOCAL]["median"] for case, record in records.items() if case.num_nodes < 4)
    known = {key: value for key, value in seconds.items() if key[0].num_nodes < 4 and key[0].world_size > 1}
    links = calibrate(known, computing=computing)
    rows = []
    for (case, name), measured in seconds.items():
        if case.world_size == 1:
            continue
        record = records[case]
        expected, counted = predicted_traffic(record["groups"], name), counted_bytes(record, name)
        row = {
            "case": case.name,
            **asdict(case),
            "algorithm": name,
            "is_calibrated_on": case.num_nodes < 4,
            "measured": record["seconds"][name],
            "predicted_seconds": simulated_seconds(case, name, links, computing=computing),
            "streams_are_equal": {way: stream_bytes(each) for way, each in expected.items()} == counted,
            "node_payload_bytes": max((each.payload_bytes for each in expected.values()), default=0),
            "node_messages": max((each.num_messages for each in expected.values()), default=0),
        }
        row["error"] = row["predicted_seconds"] / measured - 1
        rows.append(row | _nulls(case, name, seconds))
    return links, computing, rows


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the errors of the simulator and of the predictors that know no network."""
    names = ("error", "linear_error", "line_error")
    medians = {f"median_{name}": median(abs(row[name]) for row in rows) for name in names}
    return medians | {"largest_error": max(abs(row["error"]) for row in rows)}


def _nulls(case: Case, name: str, seconds: Mapping[tuple[Case, str], float]) -> dict[str, float]:
    """Predict without a network: one node's step, and a straight line through one and two nodes'."""
    if case.num_nodes < 4:
        return {}
    one = seconds[replace(case, num_nodes=1, link="none", place="block"), name]
    two = seconds[replace(case, num_nodes=2), name]
    measured = seconds[case, name]
    return {"linear_error": one / measured - 1, "line_error": (one + 3 * (two - one)) / measured - 1}


def show(row: Mapping[str, Any]) -> str:
    nulls = "".join(f"{row[key]:9.1%}" if key in row else f"{'':9}" for key in ("linear_error", "line_error"))
    return (
        f"{row['case']:28}{row['algorithm']:13}{1e3 * row['measured']['median']:9.0f}"
        f"{1e3 * row['predicted_seconds']:10.0f}{row['error']:9.1%}{nulls}"
        f"{row['node_messages']:9}  {'equal' if row['streams_are_equal'] else 'NOT EQUAL'}"
        + ("  (calibrated on)" if row["is_calibrated_on"] else "")
    )


def main(argv: Sequence[str] | None = None, *, run: Callable[..., Any] = measure) -> int:
    """Measure, predict, print the table; return 1 if bytes or values are not as required."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3, help="repetitions of each step (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    options = parser.parse_args(argv)
    facts = conditions(options)
    records = {}
    for case in cases():
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        records[case] = run(case, repetitions=options.repetitions)
    links, computing, rows = compare(records)
    summary = summarise([row for row in rows if not row["is_calibrated_on"]])
    num_wrong = sum(record["num_wrong"] for record in records.values())
    results = {
        "benchmark": "simulate-emulated",
        "conditions": facts,
        "stated_seconds": STEP_SECONDS,
        "gradient_bytes": ELEMENT_BYTES * SHAPE.num_parameters,
        "sizes": asdict(SIZES),
        "calibrated": asdict(links) | {"computing_seconds": computing},
        "predicted_on_four_nodes": summary,
        "num_wrong": num_wrong,
        "rows": rows,
    }
    write_record(options.out, results)
    head = f"{'':41}{'measured':>9}{'simulated':>10}{'error':>9}{'linear':>9}{'line':>9}{'messages':>9}"
    print("\n".join([head, *map(show, rows)]))
    print(", ".join(f"{name.replace('_', ' ')} {value:.1%}" for name, value in summary.items()))
    return 0 if not num_wrong and all(row["streams_are_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
