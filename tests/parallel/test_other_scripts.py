"""Scripts of other people with the parts of bigbatch in them, as real jobs; and the page that shows them how."""

import importlib.util
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from runpy import run_path

import pytest
import torch
from test_lost_rank import SURVIVED, finish, start_ranks
from test_parallel import RANKS, assert_all_passed, fork_job, job_argv, needs_mpi, run_forked, run_to_the_end
from torch import nn

from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.ddp_hook import ddp_comm_hook

pytestmark = pytest.mark.long


ROOT = Path(__file__).resolve().parents[2]
HOROVOD = Path(__file__).with_name("ranks_horovod.py")
PAGE, DDP_PAGE = ROOT / "docs/compare.md", ROOT / "docs/from-ddp.md"

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None,
    reason="needs Horovod, built with MPI: tests/container/run --build-arg HOROVOD=1 builds it and runs this",
)


@pytest.mark.parametrize("arguments", [("ddp", "gloo", "tcp"), ("shared-group",)])
def test_ddp_with_our_hook(arguments: Sequence[str]) -> None:
    assert_all_passed(run_forked(3, arguments, target="ranks_ddp:main"), num_ranks=3)


def test_ddp_survivors_name_the_lost_rank() -> None:
    ranks = start_ranks(3, ["lose", "tcp", "1"], target="ranks_ddp:main")
    results = finish(ranks, victim=1, timeout_seconds=250)
    assert results[1][0] == -signal.SIGKILL
    for rank in (0, 2):
        code, output = results[rank]
        assert code == SURVIVED, output
        expected = rf"noticed after \d+\.\d s: .*PeerLostError: rank {rank}: all-reduce of DDP bucket \d \(\d+ bytes\) "
        assert re.search(expected + r"failed after \d+\.\d s; no answer from rank 1 on node0", output), output


def test_distributed_optimizer_over_ranks() -> None:
    assert_all_passed(run_forked(2, ["optimizer", "gloo", "tcp"], target="ranks_horovod:main"), num_ranks=2)


@needs_mpi
@needs_horovod
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_horovod_that_is_real(num_ranks: int) -> None:
    argv = job_argv("mpirun", num_ranks=num_ranks, arguments=["horovod"])
    argv = [str(HOROVOD) if word == str(RANKS) else word for word in argv]
    assert_all_passed(run_to_the_end(argv, timeout_seconds=250), num_ranks=num_ranks)


@pytest.mark.gpu
def test_ddp_with_our_hook_on_a_gpu() -> None:
    """One rank, whose sum is its own part: the future's way through streams."""
    torch.distributed.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        communicator = connect()
        plain = nn.Linear(64, 64, device=communicator.device)
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64, device=communicator.device))
        model.module.load_state_dict(plain.state_dict())
        model.register_comm_hook(None, ddp_comm_hook(communicator))
        images_BC = torch.randn(8, 64, device=communicator.device)
        for network in (model, plain):
            network(images_BC).square().mean().backward()
        torch.testing.assert_close(model.module.weight.grad, plain.weight.grad, rtol=0, atol=0)
    finally:
        torch.distributed.destroy_process_group()


# --- docs/from-ddp.md and docs/compare.md ---


def test_both_sides_of_ddps_page_print_the_same_losses(tmp_path: Path) -> None:
    """DDP's own run is the peer: accumulation, batch norm's buffers, averages."""
    _, lines = [text.splitlines() for text in re.findall(r"^```diff\n(.*?)^```$", DDP_PAGE.read_text(), re.M | re.S)]
    losses = {}
    for side in "-+":
        script = tmp_path / "train.py"
        script.write_text("\n".join(line[1:] for line in lines if line[:1] in (" ", side)))
        shown = run_forked(2, [str(script)], target="test_other_scripts:run_page")
        losses[side] = [float(x) for x in re.findall(r"loss (\d+\.\d+)", shown)]
    assert len(losses["-"]) == 3
    assert losses["+"] == pytest.approx(losses["-"], abs=2e-4)


def code_blocks() -> list[str]:
    """The page's Python."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def run_page(script: str) -> int:
    """What a forked process runs."""
    run_path(script, run_name="__main__")
    return 0


@pytest.mark.parametrize("index", range(len(code_blocks())))
def test_pages_code_runs_alone_and_in_a_job(index: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(code_blocks()[index])
    code, alone = fork_job("test_other_scripts:run_page", [str(script)], [{}], timeout_seconds=200)
    assert code == 0, alone
    together = run_forked(2, [str(script)], target="test_other_scripts:run_page")
    losses = [[float(x) for x in re.findall(r"loss (\d+\.\d+)", text)] for text in (alone, together)]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)  # the batch is global, whatever the number of ranks


def test_page_names_what_exists() -> None:
    """Every call of ours in the page's tables can be found where it says."""
    text = PAGE.read_text() + DDP_PAGE.read_text()
    for name in re.findall(r"`(bigbatch(?:\.(?!toml)\w+)+)`", text):
        assert resolve_name(name), name
    for link in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (PAGE.parent / link).exists(), link
