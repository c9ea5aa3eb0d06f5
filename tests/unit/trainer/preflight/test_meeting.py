"""The nodes of a preflight: some lack a GPU, share a name, or do not answer."""

from types import SimpleNamespace

import pytest
from hand_made_nodes import place

from bigbatch.trainer.preflight.meeting import misfits, silent


def test_equal_places_fit() -> None:
    assert misfits([place(0), place(1)]) == []
    assert misfits([place(0, num_gpus=0)]) == []


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("complaint", [None, "8 ranks on n1 but 7 GPUs"])
def test_node_that_lacks_a_gpu_is_named(count: int, complaint: str | None) -> None:
    odd = place(1, num_gpus=7, complaint=complaint)
    (finding,) = misfits([odd if number == 1 else place(number) for number in range(count)])
    assert finding.text == "n1: 7 GPUs, elsewhere 8: look at nvidia-smi and the kernel's log there"
    assert finding.hosts == ("n1",)


def test_too_few_gpus_everywhere_are_no_nodes_fault() -> None:
    found = misfits([place(number, num_gpus=4, complaint=f"8 ranks on n{number} but 4 GPUs") for number in (0, 1)])
    assert [finding.text for finding in found] == ["8 ranks on n0 but 4 GPUs", "8 ranks on n1 but 4 GPUs"]
    assert [finding.hosts for finding in found] == [(), ()]


def test_two_nodes_of_one_name_are_told() -> None:
    (finding,) = misfits([place(0, host="localhost"), place(1, host="localhost"), place(2)])
    assert finding.text.startswith("2 nodes have the host name localhost (ranks 0, 8)")
    assert finding.hosts == ()


def test_silent_node_is_told_apart_from_a_silent_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[0-3]")
    control = SimpleNamespace(world_size=8, host_of=lambda rank: f"n{rank // 2}")
    (finding,) = silent([4, 5, 7], control)  # type: ignore[arg-type]
    assert finding.text.startswith("no answer from ranks 4, 5, 7, on n2 within 12 s: see whether its processes started")
    assert finding.hosts == ("n2",)
    (finding,) = silent([7], control)  # type: ignore[arg-type]
    assert finding.text.startswith("no answer from rank 7 within 12 s: ")
    assert finding.hosts == ()
    assert silent([], control) == []  # type: ignore[arg-type]
