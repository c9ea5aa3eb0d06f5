"""Ports of the rendezvous: held from their choice on, and outside of the range of outgoing connections."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bigbatch.comm.rendezvous import ports
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.meeting import listen, rendezvous
from bigbatch.comm.rendezvous.ports import FIRST_JOB_PORT, NUM_JOB_PORTS, adopt, free_port, hold_port

RANK = ProcessEnv("torchrun", 0, 2, 0, 2, "here", None, secret=b"of this test")


@pytest.fixture(params=[True, False], ids=["listens", "is bound"])
def holder(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with hold_port("127.0.0.1", listens=request.param) as held:
        yield held


def port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])


def test_ports_are_outside_of_the_range_of_outgoing_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "OUTGOING", tmp_path / "range")
    (tmp_path / "range").write_text(f"{FIRST_JOB_PORT + 3}\t{FIRST_JOB_PORT + NUM_JOB_PORTS + 1}\n")
    assert {free_port() for _ in range(20)} <= {*range(FIRST_JOB_PORT, FIRST_JOB_PORT + 3)}
    with hold_port("127.0.0.1") as one, hold_port("127.0.0.1") as two, hold_port("127.0.0.1") as three:
        assert len({port_of(one), port_of(two), port_of(three)}) == 3
        with hold_port("127.0.0.1") as fourth:  # none is left: one of the kernel's, which is held as well
            assert port_of(fourth) not in range(FIRST_JOB_PORT, FIRST_JOB_PORT + NUM_JOB_PORTS)
    (tmp_path / "range").unlink()
    assert free_port() in range(FIRST_JOB_PORT, FIRST_JOB_PORT + NUM_JOB_PORTS)


def test_held_port_is_not_taken_by_an_address_that_is_gone() -> None:
    with pytest.raises(OSError, match="Cannot assign"):
        hold_port("192.0.2.1")


def test_held_port_is_refused_to_every_other_search(holder: socket.socket) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port_of(holder)))


def test_held_port_of_our_own_ranks_is_refused_to_all() -> None:
    """A server with a fixed port, or an attacker, could else answer the ranks until rank 0 has imported torch."""
    with hold_port("127.0.0.1") as held, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", port_of(held))


def test_held_port_takes_a_store_of_torch_in_a_users_script() -> None:
    with hold_port("127.0.0.1", listens=False) as held:
        store = torch.distributed.TCPStore("127.0.0.1", port_of(held), is_master=True, wait_for_workers=False)
        store.set("key", "1")
        assert store.get("key") == b"1"


def test_rank_0_serves_its_store_on_the_socket_that_it_inherited(holder: socket.socket) -> None:
    at = ("127.0.0.1", port_of(holder))
    env = replace(RANK, master=at, listener=os.dup(holder.fileno()))
    holder.close()
    assert rendezvous(env, timeout_seconds=60, warn_seconds=60).port == at[1]


def test_descriptor_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """A child of rank 0 inherits the variable, but not the socket: the number may be that of any file."""
    with hold_port("127.0.0.1") as held, (tmp_path / "file").open("w") as file:
        assert adopt(held.fileno(), port=port_of(held) - 1) is None
        assert adopt(file.fileno(), port=port_of(held)) is None
        assert adopt(10**6, port=port_of(held)) is None
        file.write("still open")
        assert held.fileno() >= 0
