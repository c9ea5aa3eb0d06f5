"""Gathers over groups of ranks, in a world of one; tests/parallel has more."""

import json

import pytest
import torch
from error_texts import naming
from one_rank import RecordingBackend, alone, transport_over

from bigbatch.comm.backends.host_staging import HostStaging
from bigbatch.comm.gradients.exposed_time import ExposedTime
from bigbatch.comm.gradients.group_gather import make_group_gather
from bigbatch.comm.timeline import recording

LABEL = "gather of moments over ranks 0 to 0"


def test_group_gather_of_one_rank_gathers_its_own() -> None:
    communicator, exposed = alone(RecordingBackend()), ExposedTime()
    gather = make_group_gather(communicator.transport, group_size=1, exposed=exposed, what="moments")
    own_N = torch.arange(3.0)
    assert gather(own_N).tolist() == [[0.0, 1.0, 2.0]]
    assert gather(torch.arange(6.0).view(3, 2)[:, 0]).tolist() == [[0.0, 2.0, 4.0]]
    queue = communicator.transport.backend
    assert (queue.events, queue.ranks) == ([LABEL] * 2, [(0,)] * 2), "in the queue of all other operations"
    assert exposed.take_seconds() > 0


def test_group_gather_shows_in_the_timeline() -> None:
    communicator = alone(RecordingBackend())
    gather = make_group_gather(communicator.transport, group_size=1, exposed=ExposedTime(), what="moments")
    with recording(communicator.transport) as timeline:
        gather(torch.zeros(5))
    events = json.loads(timeline.gather(communicator.connection.control))["traceEvents"]
    assert [(event["name"], event["args"]["bytes"]) for event in events if event["ph"] == "X"] == [(LABEL, 20)]


@pytest.mark.gpu
def test_group_gather_of_gpu_tensors_goes_through_the_host_where_the_transport_does() -> None:
    staged = transport_over(RecordingBackend(), device="cuda:0", staging=HostStaging(torch.device("cuda:0")))
    gather = make_group_gather(staged, group_size=1, exposed=ExposedTime(), what="moments")
    for value in (1.0, 2.0):
        gathered_1N = gather(torch.full((1000,), value, device="cuda") * 3)
        assert gathered_1N.is_cuda
        assert torch.equal(gathered_1N.cpu(), torch.full((1, 1000), 3 * value))


def test_group_gather_refuses_groups_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match=naming("1 rank", "groups of 2")):
        make_group_gather(transport_over(RecordingBackend()), group_size=2, exposed=ExposedTime(), what="moments")
