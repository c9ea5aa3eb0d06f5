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


def check_one_order(communicator: Communicator) -> None:
    """Two networks, of which from step 1 on rank 0 uses both, rank 1 one, the others none; one or two reducers.

    Hooks start sums on some ranks, wait() on others. With two reducers the script also sums before wait().
    """
    n, rank, ones_BC = communicator.world_size, communicator.rank, torch.ones(1, 3, dtype=torch.float64)
    for num_reducers in (1, 2):
        twins = [nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(2)]
        for k, twin in enumerate(twins):
            nn.init.constant_(twin.weight, k)
        named = [[(f"{k}.weight", twin.weight)] for k, twin in enumerate(twins)]
        groups = named if num_reducers == 2 else [named[0] + named[1]]
        reducers = [GradientReducer(group, communicator, threshold_bytes=1) for group in groups]
        for step in range(4):
            used = max(0, 2 - rank) if step else 2
            for twin in twins[:used]:
                (twin(ones_BC).sum() * (rank + 1)).backward()
            if step % 2 and num_reducers == 2:  # of the size of a gradient
                metric_9 = torch.full((9,), float(rank), dtype=torch.float64)
                assert communicator.sum_(metric_9, label="a metric").tolist() == [n * (n - 1) / 2] * 9
            for reducer in reducers:
                reducer.wait()
            sums = [sum(r + 1 for r in range(n) if k < (max(0, 2 - r) if step else 2)) for k in range(2)]
            for twin, expected in zip(twins, sums, strict=True):
                assert twin.weight.grad.flatten().tolist() == [float(expected)] * 9, (num_reducers, step)
            for reducer in reducers:
                reducer.zero_grad()
        for reducer in reducers:
            reducer.close()


def check_sum_between(communicator: Communicator) -> None:
    """Horovod's loop: a metric is averaged between backward and step. One rank does not use the last layer."""
    model, n = make_model(), communicator.world_size
    reducer = GradientReducer(model.named_parameters(), communicator, threshold_bytes=1000, buffer_bytes=1100)
    for step in range(3):
        part = model[:5] if step and communicator.rank == n - 1 else model
        part(values(75, torch.float64, rank=0).view(1, 3, 5, 5)).square().sum().backward()
        size = reducer.buffers[0].numel()
        metric_N = torch.ones(size, dtype=torch.float64)
        assert communicator.sum_(metric_N, label="a metric").tolist() == [float(n)] * size
        reducer.wait()
        whole, part_of_it = make_model(), make_model()
        for layers in (whole, part_of_it[:5]):
            layers(values(75, torch.float64, rank=0).view(1, 3, 5, 5)).square().sum().backward()
        for ours, all_, some in zip(*(m.parameters() for m in (model, whole, part_of_it)), strict=True):
            last = all_.grad if not step else torch.zeros_like(ours) if some.grad is None else some.grad
            torch.testing.assert_close(ours.grad, (n - 1) * all_.grad + last, rtol=1e-11, atol=1e-13)
        reducer.zero_grad()


def check_changed_gradients(communicator: Communicator) -> None:
    """Clipping before wait() is refused on all ranks, whether the sums have started, ended or neither."""
    model = make_model()
    reducer = GradientReducer(model.named_parameters(), communicator, threshold_bytes=1000, buffer_bytes=1100)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.clone() for parameter in model.parameters()]
    for step in range(3):
        loss_of(model, values(75, torch.float64, rank=0).view(1, 3, 5, 5), num_images=1).backward()
        if step:
            while communicator.backend.oldest() is not None:  # the sums are done in time
                time.sleep(0.001)
        with pytest.raises(CommError, match=r"not summed over the ranks: call wait\(\)"):
            optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(CommError, match=r"buffer \d.* changed between backward and wait\(\)"):
            reducer.wait()
        reducer.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
