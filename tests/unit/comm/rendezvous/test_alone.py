"""A process alone has a control channel without other ranks, and loads nothing that only several ranks need."""

from pathlib import Path

import pytest
from benchmark_process import fork_fresh_code

from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.departure import Departure
from bigbatch.comm.rendezvous.environ import ALONE

OF_SEVERAL = ("several_ranks", "backends.tcp", "backends.links", "backends.torch_distributed", "backends.node_memory")
OF_SEVERAL += ("rendezvous.job_control", "rendezvous.store_process", "rendezvous.watch", "rendezvous.regroup")
OF_SEVERAL += ("algorithms.ring", "algorithms.doubling", "algorithms.shared", "algorithms.hybrid", "tuning")


def test_process_alone_gathers_its_own_values() -> None:
    with connect(env=ALONE) as communicator:
        control = communicator.connection.control
        assert communicator.gather((1, "a")) == [[1, "a"]], "as JSON has it"
        assert control.gather_text("a", what="b") == control.collect_text("a", what="b") == ["a"]
        assert control.tell_all("a", what="b", timeout_seconds=1) == "a"
        control.agree("the config", "a")
        assert control.host_of(0) == ALONE.host
        assert not control.detector.has_failed


@pytest.mark.parametrize("joins", [False, True])
def test_process_alone_departs_at_its_next_boundary(joins: bool) -> None:
    with connect(env=ALONE) as communicator:
        departure = Departure(communicator.connection.control)
        assert not departure.poll()
        assert not departure.is_due()
        departure.ask(joins=joins)
        assert departure.poll()
        assert departure.is_due()
        assert departure.is_join == joins


def test_process_alone_that_aborts_has_failed() -> None:
    communicator = connect(env=ALONE)
    communicator.connection.abort()
    assert communicator.connection.control.detector.has_failed
    communicator.close()


def test_process_alone_loads_no_part_of_several_ranks(tmp_path: Path) -> None:
    script = f"""
import sys, torch, bigbatch
from bigbatch.comm.rendezvous.environ import ALONE
with bigbatch.connect(env=ALONE, device=torch.device("cpu")) as communicator:
    communicator.sum_(torch.ones(3), label="x")
print([name for name in {OF_SEVERAL} if "bigbatch.comm." + name in sys.modules])
"""
    assert fork_fresh_code(script, cwd=tmp_path, timeout_seconds=60) == (0, "[]\n")
