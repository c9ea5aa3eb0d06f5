"""The reducer's gradients over real ranks: part of ranks.py."""

import time
import zlib

import pytest
import torch
from ranks_sums import as_bytes, values
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.errors import CommError


def make_model() -> nn.Sequential:
    """The same on every rank: a channels-last convolution and two linear layers, in float64."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5), nn.Linear(5, 3)
    )
    set_weights_(model)
    return model.double().to(memory_format=torch.channels_last)


def set_weights_(model: nn.Module) -> None:
    """Not by torch's generator, which ranks that are threads share."""
    for parameter in model.parameters():
        parameter.data = 0.2 * values(parameter.numel(), parameter.dtype, rank=0).view_as(parameter)


def loss_of(model: nn.Module, images_BCHW: Tensor, *, num_images: int) -> Tensor:
    """Mean over the global batch; images_BCHW is a part of it."""
    return model(images_BCHW).square().sum() / num_images


def check_gradients(communicator: Communicator) -> None:
    """Law 1 for the reducer: any split over ranks and microbatches gives the whole batch's gradient."""
    images_BCHW = values(24 * 3 * 5 * 5, torch.float64, rank=0).view(24, 3, 5, 5)
    whole = make_model()
    loss_of(whole, images_BCHW, num_images=24).backward()
    mine_BCHW = images_BCHW.tensor_split(communicator.world_size)[communicator.rank]
    model = make_model()
    reducer = GradientReducer(model.named_parameters(), communicator, threshold_bytes=1000, buffer_bytes=1100)
    assert len(reducer.buffers) > 2
    for num_microbatches in (1, 2, 3):
        ranks_1 = torch.ones(1)
        for k, part_BCHW in enumerate(mine_BCHW.tensor_split(num_microbatches)):
            reducer.is_active = k == num_microbatches - 1
            loss = loss_of(model, part_BCHW, num_images=24)
            if reducer.is_active:
                reducer.start_extra(ranks_1, label="an extra tensor")
            loss.backward()
        reducer.wait()
        assert ranks_1.item() == communicator.world_size
        for ours, reference in zip(model.parameters(), whole.parameters(), strict=True):
            assert ours.grad is not None
            assert ours.grad.stride() == ours.stride()
            torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-11, atol=1e-13)
        communicator.agree("the gradients", "\n".join(str(zlib.crc32(as_bytes(b))) for b in reducer.buffers))
        reducer.zero_grad()


def check_uneven_use(communicator: Communicator) -> None:
    """A layer that only rank 0 uses: the others count as zero, and no rank waits for another's order."""
    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)]).double()
    for layer in model:
        nn.init.ones_(layer.weight)
    reducer = GradientReducer(model.named_parameters(), communicator, threshold_bytes=1, buffer_bytes=1)
    hidden_BC = model[0](torch.ones(1, 2, dtype=torch.float64))
    if communicator.rank == 0:
        hidden_BC = model[1](hidden_BC)
    hidden_BC.sum().backward()
    reducer.wait()
    n = communicator.world_size
    # d/dW0 is 2 for rank 0, whose output passes two ones, and 1 for the others; d/dW1 is its input, 2
    expected = [[2.0 + n - 1] * 4, [2.0] * 4, [0.0] * 4]
    assert [layer.weight.grad.flatten().tolist() for layer in model] == expected


def check_changed_gradients(communicator: Communicator) -> None:
    """Clipping before wait() is refused on all ranks, whether the sums have started, ended or neither."""
    model = make_model()
    reducer = GradientReducer(model.named_parameters(), communicator, threshold_bytes=1000, buffer_bytes=1100)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.clone() for parameter in model.parameters()]
    for step in range(3):
        loss_of(model, values(75, torch.float64, rank=0).view(1, 3, 5, 5), num_images=1).backward()
        if step:
            while communicator.transport.backend.oldest() is not None:  # the sums are done in time
                time.sleep(0.001)
        with pytest.raises(CommError, match=r"not summed over the ranks: call wait\(\)"):
            optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(CommError, match=r"buffer \d.* changed between backward and wait\(\)"):
            reducer.wait()
        reducer.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def check_other_operations(communicator: Communicator) -> None:
    """NCCL matches sums by their order alone: wait() refuses a step in which ranks summed by other names."""
    if communicator.transport.backend.name != "nccl" or communicator.world_size == 1:
        return  # other transports compare each operation
    model = make_model()
    reducer = GradientReducer(model.named_parameters(), communicator)
    refused = pytest.raises(CommError, match=r"rank 1 and rank 0 .*critic of rank 1.* wait\(\)")
    for is_equal in (False, True, True, True, True, False):
        loss_of(model, values(75, torch.float64, rank=0).view(1, 3, 5, 5), num_images=1).backward()
        communicator.sum_(torch.ones(7), label="a critic" if is_equal else f"critic of rank {communicator.rank}")
        if not is_equal:
            with refused:
                reducer.wait()
        reducer.wait()
        reducer.zero_grad()
    reducer.close()
