"""The order of operations over a transport that does not compare them itself."""

import inspect
import re

import pytest
import torch
from error_texts import naming
from one_rank import alone
from torch import nn

from bigbatch.comm import operation_order
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.operation_order import NUM_COMPARED, OperationOrder
from bigbatch.comm.rendezvous.alone import AloneControl
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.errors import PeerLostError, notes_of


def recording_order() -> tuple[OperationOrder, list[str]]:
    """An order, and the texts that it compares."""
    compared: list[str] = []

    def agree(what: str, text: str, *, remedy: str) -> None:
        assert "wait()" in remedy
        compared.append(text)

    return OperationOrder(agree), compared


def test_controls_of_jobs_take_what_the_comparison_gives_them() -> None:
    """It calls their agree() with a keyword; over NCCL each step does."""
    for control in (JobControl, AloneControl):
        inspect.signature(control.agree).bind(None, "what", "text", remedy=operation_order.REMEDY)


def step(order: OperationOrder, *names: str) -> None:
    for name in names:
        order.note(name, None)
    order.compare()


def test_first_steps_and_changes_are_compared() -> None:
    order, compared = recording_order()
    for _ in range(NUM_COMPARED + 5):
        step(order, "buffer 0", "buffer 1")
    assert len(compared) == NUM_COMPARED
    assert len(set(compared)) == 1
    step(order, "buffer 1", "buffer 0")
    step(order, "buffer 0", "buffer 1")
    step(order, "buffer 0", "buffer 1", "report of step 100")
    assert len(compared) == NUM_COMPARED + 2, "what was agreed once is not compared again"
    assert len(set(compared)) == 3


def test_reports_of_different_steps_are_compared_once() -> None:
    """A comparison asks the job's store of every rank: seconds of a job of thousands."""
    order, compared = recording_order()
    for k in range(NUM_COMPARED):
        step(order, "buffer 0", f"report of step {k}")
    for k in range(100):
        step(order, "buffer 0", f"report of step {20 * k}")
    assert len(compared) == NUM_COMPARED


def test_step_of_many_operations_is_compared_whole() -> None:
    """Those beyond the last ones count by their hash and number."""
    texts = []
    for first in ("a metric", "another metric"):
        order, compared = recording_order()
        step(order, first, *(f"sum {k}" for k in range(2 * operation_order.MAX_LAST)))
        texts += compared
        assert len(compared[0].splitlines()) == operation_order.MAX_LAST + 1
    assert texts[0] != texts[1]


def test_agreed_orders_are_forgotten_but_not_the_usual_one() -> None:
    order, compared = recording_order()
    for _ in range(NUM_COMPARED):
        step(order, "buffer 0")
    for k in range(3 * operation_order.MAX_AGREED):
        step(order, "buffer 0", f"metric {k}")
        step(order, "buffer 0")
    assert len(order._agreed) <= operation_order.MAX_AGREED
    assert compared.count(compared[0]) == NUM_COMPARED


def test_rank_that_alone_starts_something_new_is_told_why_it_waited() -> None:
    def agree(what: str, text: str, *, remedy: str) -> None:
        raise PeerLostError("rank 0 did not come")

    with pytest.raises(PeerLostError, match="rank 0") as caught:
        step(OperationOrder(agree), "buffer 0")
    (note,) = notes_of(caught.value)
    assert re.search(naming("operations that are new", "wait()"), note)


def test_transport_that_compares_each_operation_is_not_compared_again() -> None:
    order = OperationOrder()
    assert not order.is_compared
    order.note("buffer 0", None)
    assert not order._last


def test_capture_counts_and_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may fail on one rank alone, which would then have counted less, while another one compares."""
    communicator, weight = alone(), nn.Parameter(torch.ones(3))
    connection = communicator.transport.connection
    compared: list[str] = []
    vars(connection)["order"] = order = OperationOrder(lambda what, text, remedy: compared.append(text))
    reducer = GradientReducer([("weight", weight)], communicator)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(3):
        weight.sum().backward()
        reducer.wait()
        reducer.zero_grad()
    begun: list[None] = []
    monkeypatch.setattr(type(connection.control.detector), "begin", lambda self: begun.append(None))
    num_compared = len(compared)
    assert num_compared == 3
    order.note("report of step 3", None)  # new, so the next step would compare it
    before = dict(vars(order))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        weight.sum().backward()
        reducer.wait()
    assert (vars(order), begun, len(compared)) == (before, [], num_compared)
    reducer.close()
