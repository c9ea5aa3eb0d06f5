"""Work on whole matrices that ranks share out, against the same work done by each of them."""

from collections.abc import Sequence
from unittest.mock import patch

import torch
from ranks_sharded import ROUNDING, WHOLE, Run, assert_same_on_all, same, start
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.scatter_gather import ScatterGather
from bigbatch.trainer.optim import divided_work
from bigbatch.trainer.optim.divided_work import DividedWork


def check_divided_update(communicator: Communicator) -> None:
    """Check every promise of the divided update."""
    # of four matrices on more than a few ranks most of a gather is padding
    with patch.object(divided_work, "MAX_PADDING", communicator.world_size):
        for dtype in (torch.float32, torch.bfloat16):
            check_results(communicator, dtype=dtype)
        for name in WHOLE:
            for precision in ROUNDING:
                check_update(communicator, name=name, precision=precision)
    check_padding(communicator)


def check_results(communicator: Communicator, *, dtype: torch.dtype) -> None:
    """Each rank does some, and has the results of all, in the layout of what was given; also where it has none."""
    for num_tensors in (1, communicator.world_size - 1, 2 * communicator.world_size + 1):
        tensors = [torch.full((2, i + 1, 1, 2), float(i)) for i in range(num_tensors)]
        tensors = [t.to(memory_format=torch.channels_last) for t in tensors]
        done: list[float] = []

        def work(some: Sequence[Tensor], done: list[float] = done) -> list[Tensor]:
            done += [float(t.flatten()[0]) for t in some]
            return [(t + torch.arange(t.size(1)).view(-1, 1, 1)).to(dtype) for t in some]

        expected = work(tensors)
        done.clear()
        found = DividedWork(communicator)(tensors, work, costs=[1.0] * num_tensors, dtype=dtype)()
        assert len(done) <= -(-num_tensors // communicator.world_size)
        for ours, theirs, given in zip(found, expected, tensors, strict=True):
            assert torch.equal(ours, theirs)
            assert (ours.dtype, ours.stride()) == (dtype, given.stride())
        mine = communicator.gather(" ".join(map(str, done)))
        assert sorted(map(float, " ".join(mine).split())) == list(range(num_tensors))


def check_update(communicator: Communicator, *, name: str, precision: str) -> None:
    """Equals the undivided update up to rounding; bit for bit with each matrix alone; the same on all ranks."""

    def divided(*, one_by_one: bool = False) -> Run:
        run = start(name, precision, communicator, sharded=False)
        run.optimizer.divide = DividedWork(communicator, one_by_one=one_by_one)  # type: ignore[attr-defined]
        return run

    whole, some, single = start(name, precision, communicator, sharded=False), divided(), divided(one_by_one=True)
    before = whole.masters()
    for run in (whole, some, single):
        run.steps(0, 1)
    saved = some.state()
    some.steps(7, skip=True)  # leaves no trace, and takes part in the gather
    for run in (whole, some, single):
        run.steps(2, 3)
    way = float((whole.masters() - before).norm())
    assert way > 0.01
    for run in (some, single):
        assert float((run.masters() - whole.masters()).norm()) < ROUNDING[precision] * way
        assert_same_on_all(run)
    again = divided()
    again.load(saved)
    again.steps(2, 3)
    assert same(again.state(), some.state())


def check_padding(communicator: Communicator) -> None:
    """One matrix and many ranks: the work is not divided, and all ranks do it."""
    if communicator.world_size <= divided_work.MAX_PADDING:
        return
    with patch.object(ScatterGather, "start_all_gather", side_effect=AssertionError("nothing to gather")):
        (found,) = DividedWork(communicator)([torch.ones(3, 2)], list, costs=[1.0], dtype=torch.float32)()
    assert found.tolist() == [[1.0, 1.0]] * 3
