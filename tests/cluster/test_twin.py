"""What the simulator says that steps send from node to node, against what the kernel counts on emulated nodes."""

import pytest

from benchmarks.twin import emulated
from benchmarks.twin.emulated_rank import ALGORITHMS
from benchmarks.twin.traffic import stream_bytes
from bigbatch.tools.simulate.shapes import ModelShape

ODD = ModelShape("odd", (1003, 70_001, 200_003, 7, 333_337), (0.1, 0.3, 0.6, 0.9, 1.0), 0.0)
"""Nothing divides: parts of unequal length, and some of several segments."""
CASES = (emulated.Case(3, 1, "1gbit", "block"), emulated.Case(2, 2, "1gbit", "cyclic"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.place)
def test_bytes_and_messages_between_nodes_equal_the_kernel_s(case: emulated.Case) -> None:
    """Each message has 25 bytes before it: equal streams mean as many messages, too."""
    record = emulated.measure(case, repetitions=1, shape=ODD, seconds=0.02)
    assert record["num_wrong"] == 0
    nodes = [[0, 2], [1, 3]] if case.place == "cyclic" else [[0], [1], [2]]
    assert record["groups"] == nodes
    for name in ALGORITHMS:
        expected = emulated.predicted_traffic(record["groups"], name, ODD)
        assert {way: stream_bytes(each) for way, each in expected.items()} == emulated.counted_bytes(record, name)
        # interfaces count headers and acknowledgements as well, and what the ranks say to meet
        sent = [
            sum(each.payload_bytes for way, each in expected.items() if way[0] == node) for node in range(len(nodes))
        ]
        for payload, counted in zip(sent, record["node_bytes"][name][0], strict=True):
            assert payload < counted < 1.1 * payload
