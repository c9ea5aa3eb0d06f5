"""The simulator's comparison with emulated clusters, on records that are made up; tests/cluster makes real ones."""

import json

import pytest

from benchmarks.twin import emulated
from benchmarks.twin.emulated_rank import ALGORITHMS, LOCAL
from benchmarks.twin.traffic import stream_bytes

TRUTH = emulated.Links(inside_seconds=2e-4, inside_bytes_per_second=4e8, across_seconds=1e-3, across_share=0.8)


def record_of(case: emulated.Case, *, repetitions: int, lost_bytes: int = 0) -> dict:
    """A cluster that is what the model says, with the numbers of TRUTH."""
    world = range(case.num_nodes * case.ranks_per_node)
    step = case.num_nodes if case.place == "cyclic" else 1
    groups = [
        [rank for rank in world if (rank % step if step > 1 else rank // case.ranks_per_node) == node]
        for node in range(case.num_nodes)
    ]
    received = {name: {f"{rank}": {} for rank in world} for name in ALGORITHMS}
    for name in ALGORITHMS:
        for (sender, receiver), each in emulated.predicted_traffic(groups, name).items():
            told = {f"{groups[sender][0]}": stream_bytes(each) - lost_bytes}
            received[name][f"{groups[receiver][0]}"].update(told)
    seconds = {name: emulated.simulated_seconds(case, name, TRUTH, computing=0.3) for name in ALGORITHMS}
    seconds[LOCAL] = 0.3
    return {
        "groups": groups,
        "num_wrong": 0,
        "seconds": {name: {"median": each} for name, each in seconds.items()},
        "received_bytes": received,
    }


@pytest.mark.long  # the fit alone takes seconds, and minutes on a busy machine
def test_four_numbers_are_found_again_and_predict_four_nodes(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert emulated.main(["--out", str(out)], run=record_of) == 0
    record = json.loads(out.read_text())
    assert record["predicted_on_four_nodes"]["largest_error"] < 0.02
    assert abs(record["calibrated"]["across_share"] / TRUTH.across_share - 1) < 0.02
    rows = record["rows"]
    assert sum(not row["is_calibrated_on"] for row in rows) == 2 * 3 * 3
    row = next(row for row in rows if row["case"] == "4 on 4, 25mbit, block" and row["algorithm"] == "ring")
    # one node's step is 0.3 s, whatever the network
    assert row["linear_error"] < -0.5
    # a ring of four sends 3/2 of the bytes, of two as many as there are
    assert (row["node_payload_bytes"], record["gradient_bytes"]) == (927_000 * 6, 927_000 * 4)
    assert "8 on 4, 100mbit, cyclic" in capsys.readouterr().out


def test_a_byte_that_was_not_predicted_is_seen():
    few = [emulated.Case(1, 2, "none", "block"), emulated.Case(2, 1, "25mbit", "block")]
    for lost_bytes in (0, 8):
        records = {case: record_of(case, repetitions=1, lost_bytes=lost_bytes) for case in few}
        rows = emulated.compare(records)[2]
        assert [row["streams_are_equal"] for row in rows] == [True] * 3 + [lost_bytes == 0] * 3
        assert ("NOT EQUAL" in emulated.show(rows[-1])) == (lost_bytes != 0)
