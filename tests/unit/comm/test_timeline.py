"""The trace: what is recorded, and that it is the format that trace viewers read."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_rank import transport_over
from torch import nn

from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.communicator import make_communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.timeline import Timeline, merge, recording

CPU = torch.device("cpu")


def events(timeline: Timeline, *, rank: int = 0) -> list[dict[str, object]]:
    return json.loads(merge([timeline.take(rank=rank, host="here")]))["traceEvents"]


def test_spans_and_marks_have_rows_and_microseconds() -> None:
    timeline = Timeline(CPU)
    before = time.time() * 1e6
    with timeline.span("sleep", row="step", bytes=3):
        time.sleep(0.02)
    after = time.time() * 1e6
    timeline.mark("now", row="marks")
    title, *rows, span, mark = events(timeline, rank=5)
    assert title["args"] == {"name": "rank 5 on here"}
    assert {row["tid"]: row["args"]["name"] for row in rows} == {0: "step", 1: "marks"}
    assert (span["ph"], span["name"], span["tid"], span["pid"], span["args"]) == ("X", "sleep", 0, 5, {"bytes": 3})
    assert 20_000 <= span["dur"] <= after - before + 1_000  # microseconds; of two clocks
    assert before <= span["ts"] <= after
    assert (mark["ph"], mark["tid"]) == ("i", 1)
    assert mark["ts"] >= span["ts"] + span["dur"]
    assert len(events(timeline)) == 1  # taken is gone


class NamedMpi(SingleBackend):
    """Has the name of a transport that finishes on a thread of its own."""

    name = "mpi"


@pytest.mark.parametrize(
    ("backend", "staging"), [(SingleBackend, SimpleNamespace(join=lambda: None)), (NamedMpi, None)]
)
def test_transports_on_a_thread_are_timed_there(backend: type[SingleBackend], staging: Any) -> None:
    timeline = Timeline(torch.device("cuda", 0))
    ranks = make_communicator(transport_over(backend(), staging=staging, timeline=timeline), "native")
    ranks.sum_(torch.ones(3), label="buffer 0")
    ranks.transport.timeline = None
    ranks.sum_(torch.ones(3), label="buffer 1")
    assert [event["name"] for event in events(timeline) if event["ph"] == "X"] == ["buffer 0"]


@pytest.mark.parametrize("algorithm", ["native", "hierarchical"])
def test_timeline_shows_each_buffer_ready_started_and_done_beside_backward(algorithm: str) -> None:
    alone = connect(algorithm=algorithm, env=ALONE, device=CPU)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    sizes = {"threshold_bytes": 1, "buffer_bytes": 1}
    reducer = GradientReducer(model.named_parameters(), alone, **sizes, learn_order=False)
    with recording(alone.transport) as timeline:
        with timeline.span("backward", row="step"):
            model(torch.ones(1, 4)).sum().backward()
        reducer.wait()
    found = json.loads(timeline.gather(alone.connection.control))["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    by_row: dict[str, list[dict]] = {}
    for event in found:
        if event["ph"] != "M":
            by_row.setdefault(rows[event["tid"]], []).append(event)
    assert [event["name"] for event in by_row["gradients ready"]] == ["1.weight", "0.weight"]
    backward = by_row["step"][0]
    for ready, done, name in zip(by_row["buffers ready"], by_row["all-reduce"], ("1.weight", "0.weight"), strict=True):
        assert name in done["name"]
        assert done["args"] == {"algorithm": algorithm, "bytes": 64, "wire": "float32"}
        assert backward["ts"] <= ready["ts"] <= done["ts"]
        assert done["ts"] + done["dur"] <= backward["ts"] + backward["dur"]  # one rank: summed at once
