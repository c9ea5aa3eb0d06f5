"""How a rank of a job leaves: `bigbatch`'s front door."""

import os
from collections.abc import Callable

import pytest

from bigbatch import cli
from bigbatch.comm.rendezvous import environ  # noqa: F401  # a rank has read it


class Left(BaseException):
    """In place of the process's end."""


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[float]]]:
    """Run a command whose code is given as one rank of a job; its exit code, and the seconds that it slept before."""

    def run(code: int, **variables: str) -> tuple[int, list[float]]:
        for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE"))]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        slept: list[float] = []
        monkeypatch.setattr(cli.time, "sleep", slept.append)
        monkeypatch.setattr(cli, "_find_command", lambda arguments: code)

        def end(code: int) -> None:
            raise Left(code)

        monkeypatch.setattr(cli.os, "_exit", end)
        with pytest.raises(Left) as left:
            cli.main(["train"])
        return left.value.args[0], slept

    return run


def openmpi(rank: int, world_size: int) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": world_size, "LOCAL_RANK": rank % 8, "LOCAL_SIZE": 8}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(("rank", "seconds"), [(0, 0.0), (1, 0.3), (3, 0.9), (10, 0.0), (27, 2.1)])
def test_front_door_lets_failed_ranks_under_mpirun_leave_one_after_another(
    rank: int, seconds: float, leave: Callable[..., tuple[int, list[float]]]
) -> None:
    code, slept = leave(4, **openmpi(rank, 32))
    assert code == 4
    assert slept == [pytest.approx(seconds)]


def test_front_door_does_not_wait_if_all_went_well_or_mpirun_is_missing(
    leave: Callable[..., tuple[int, list[float]]],
) -> None:
    assert leave(0, **openmpi(3, 8)) == (0, [])
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
    assert leave(4, **torchrun, MASTER_ADDR="localhost", MASTER_PORT="29500") == (4, [])


def test_front_door_records_the_end_before_it_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun may be ended meanwhile, and the job's exit code is then that of the record."""
    done: list[tuple[str, int]] = []
    monkeypatch.setattr(cli, "_find_command", lambda arguments: 1)
    monkeypatch.setattr(cli, "_record_end", lambda code: done.append(("recorded", code)))
    monkeypatch.setattr(cli, "_end_connections", lambda code: done.append(("told", code)))
    assert cli.main(["train"]) == 1
    assert done == [("recorded", 1), ("told", 1)]
