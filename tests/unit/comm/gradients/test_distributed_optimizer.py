"""The optimizer wrapper on one process whose sum is as if several ranks held the same, against plain optimizers."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from error_texts import naming
from one_rank import alone, transport_over
from thread_ranks import Post, PostBackend
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from bigbatch.comm.backends.base import Group, InFlight
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.communicator import make_communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.broadcast import (
    all_reduce,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    send_object,
)
from bigbatch.comm.gradients.ddp_hook import ddp_comm_hook
from bigbatch.comm.gradients.distributed_optimizer import DistributedOptimizer
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import CommError
from bigbatch.tools.measure.timing import time_hops

SMALL = {"threshold_bytes": 100, "buffer_bytes": 150}
"""Several buffers for make_model()."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def loss_of(model: nn.Module, seed: int) -> Tensor:
    inputs_BC = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return model(inputs_BC).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrap(
    model: nn.Module, *, num_ranks: int = 1, sums: list[int] | None = None, **options: Any
) -> DistributedOptimizer:
    ranks = alone(factor=num_ranks, world_size=num_ranks, sums=sums)
    return DistributedOptimizer(sgd(model), model.named_parameters(), ranks, **{**SMALL, **options})


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for ours, reference in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-14)


def twins() -> tuple[nn.Module, nn.Module]:
    model = make_model()
    return model, copy.deepcopy(model)


def assert_trains(optimizer: DistributedOptimizer, model: nn.Module, plain: nn.Module, *, scale: float = 1.0) -> None:
    reference = sgd(plain)
    for step in range(4):
        for factor, twin, either in ((1.0, model, optimizer), (scale, plain, reference)):
            either.zero_grad()
            (factor * loss_of(twin, step)).backward()
            either.step()
    assert_same(model, plain)


@pytest.mark.parametrize(("op", "scale"), [("average", 1.0), ("sum", 3.0)])
@pytest.mark.parametrize("num_passes", [1, 4])  # fewer than the stated passes are summed by step()
def test_step_averages_or_sums(op: str, scale: float, num_passes: int) -> None:
    model, plain = twins()
    optimizer = wrap(model, num_ranks=3, op=op, backward_passes_per_step=num_passes)
    assert_trains(optimizer, model, plain, scale=scale)


def test_wrapper_that_is_closed_or_refused_leaves_no_hooks() -> None:
    """A hook of the first one would count the passes of the next, and never a step."""
    model, plain = twins()
    with pytest.raises(ValueError, match=naming("threshold_bytes=0")):
        wrap(model, threshold_bytes=0)
    first = wrap(model, num_ranks=5)
    loss_of(model, 1).backward()
    first.step()
    first.close()
    plain.load_state_dict(model.state_dict())
    assert_trains(wrap(model, num_ranks=2), model, plain)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_step_after_synchronize_sums_what_has_changed_since(is_dropped: bool) -> None:
    """Dropped: as after a step that a GradScaler skipped, in a script that calls model.zero_grad()."""
    model, plain = twins()
    optimizer, reference = wrap(model, num_ranks=3, op="sum"), sgd(plain)
    loss_of(model, 1).backward()
    optimizer.synchronize()
    if is_dropped:
        model.zero_grad()
        loss_of(model, 2).backward()
    optimizer.step()
    (3 * loss_of(plain, 1 + is_dropped)).backward()
    reference.step()
    assert_same(model, plain)
    optimizer.zero_grad()  # nothing is on its way any more


def test_backward_passes_per_step_add_up_and_travel_with_the_last_alone() -> None:
    (model, plain), sums = twins(), list[int]()
    passes = {"backward_passes_per_step": 2, "learn_order": False}
    optimizer, reference = wrap(model, num_ranks=3, sums=sums, op="sum", **passes), sgd(plain)
    for step in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        for k in range(2):
            assert sums == []
            loss_of(model, 10 * step + k).backward()
            (3 * loss_of(plain, 10 * step + k)).backward()
        assert sum(sums) == sum(parameter.numel() for parameter in model.parameters())
        optimizer.step()
        reference.step()
        sums.clear()
    assert_same(model, plain)
    for _ in range(2):
        loss_of(model, 3).backward()
    with pytest.raises(RuntimeError, match=r" 4\.\w+ .*backward_passes_per_step=2\b"):
        loss_of(model, 3).backward()


@pytest.mark.parametrize(
    "between",
    [
        lambda optimizer, model: optimizer.step(),
        lambda optimizer, model: optimizer.zero_grad(),
        lambda optimizer, model: optimizer.step(lambda: loss_of(model, 2).item()),
    ],
    ids=["step", "zero_grad", "closure"],
)
def test_step_without_backward_takes_part_in_the_sum(
    between: Callable[[DistributedOptimizer, nn.Module], object],
) -> None:
    """The other ranks may have had a backward, and wait."""
    model, sums = make_model(), []
    optimizer = wrap(model, sums=sums)
    loss_of(model, 1).backward()
    optimizer.synchronize()
    between(optimizer, model)
    sums.clear()
    optimizer.step()
    assert sum(sums) == sum(parameter.numel() for parameter in model.parameters())


def test_step_inside_skip_synchronize_and_zero_grad_need_synchronize() -> None:
    model = make_model()
    optimizer = wrap(model)
    loss_of(model, 1).backward()
    with (
        pytest.raises(RuntimeError, match=naming("step()", " synchronize()")),
        optimizer.skip_synchronize(),
    ):
        optimizer.step()
    optimizer.step()  # outside it synchronizes again
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match=naming("zero_grad()", "step()", "synchronize()")):
        optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.zero_grad()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_step_with_a_closure() -> None:
    model, plain = twins()
    optimizer, reference = wrap(model, num_ranks=3, op="sum"), sgd(plain)

    def closure(twin: nn.Module, either: torch.optim.Optimizer, *, factor: int) -> float:
        either.zero_grad()
        loss = loss_of(twin, 1)
        (factor * loss).backward()
        return loss.item()

    for _ in range(2):
        ours = optimizer.step(lambda: closure(model, optimizer, factor=1))
        assert ours == pytest.approx(reference.step(lambda: closure(plain, reference, factor=3)), rel=1e-12)
    assert_same(model, plain)


@pytest.mark.filterwarnings("error::UserWarning")
def test_grad_scaler_clipping_and_a_schedule_of_the_momentum_with_synchronize() -> None:
    """OneCycleLR changes the momentum, too. The scaler skips a step that overflows."""
    model, plain = twins()
    optimizer, reference = wrap(model, num_ranks=2), sgd(plain)
    assert isinstance(optimizer, torch.optim.Optimizer)
    one_cycle = torch.optim.lr_scheduler.OneCycleLR
    schedules = [one_cycle(each, max_lr=0.3, total_steps=6) for each in (optimizer, reference)]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, step)) * (float("inf") if step == 1 else 1.0)
        loss.backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        if step != 1:
            reference.zero_grad()
            loss_of(plain, step).backward()
            assert norm.item() == pytest.approx(clip_grad_norm_(plain.parameters(), 0.01).item(), rel=1e-12)
            reference.step()
        for schedule in schedules:
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert scaler.get_scale() == 128.0
    assert_same(model, plain)


@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_before_synchronize_is_an_error(unscale_first: bool) -> None:
    model = make_model()
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 1)).backward()
    with pytest.raises(CommError, match=naming("synchronize()", "unscale_()")):
        scaler.unscale_(optimizer) if unscale_first else scaler.step(optimizer)


@pytest.mark.parametrize("method", ["synchronize", "step"])
def test_clipping_before_synchronize_is_an_error(method: str) -> None:
    model = make_model()
    optimizer, before = wrap(model), copy.deepcopy(model.state_dict())
    loss_of(model, 1).backward()
    clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(CommError, match=naming("changed between backward", "synchronize()")):
        {"synchronize": optimizer.synchronize, "step": optimizer.step}[method]()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_state_dict_and_hooks_are_the_wrapped_optimizers(tmp_path: Any) -> None:
    model, plain = twins()
    optimizer, reference = wrap(model), sgd(plain)
    for twin, either in ((model, optimizer), (plain, reference)):
        loss_of(twin, 1).backward()
        either.step()
    torch.testing.assert_close(optimizer.state_dict(), reference.state_dict())
    assert optimizer.defaults["momentum"] == 0.9
    assert len(optimizer.state) == 6
    torch.save(reference.state_dict(), tmp_path / "state.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt"))
    optimizer.param_groups[0]["lr"] = 0.0
    before = [parameter.clone() for parameter in model.parameters()]
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    optimizer.__setstate__({})  # torch adds its hooks to step() then, as for copy.deepcopy
    loss_of(model, 1).backward()
    optimizer.step()
    assert calls == ["stepped"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert "momentum: 0.9" in repr(optimizer)
    with pytest.raises(AttributeError, match=naming("'learning_rate'")):
        _ = optimizer.learning_rate


def test_distributed_optimizer_leaves_out_frozen_parameters_and_those_of_another() -> None:
    model, plain = twins()
    for twin in (model, plain):
        twin[0].weight.requires_grad_(False)
    head = list(model[4].parameters())
    optimizer = DistributedOptimizer(
        torch.optim.SGD([p for p in model.parameters() if all(p is not h for h in head)], lr=0.1),
        model.named_parameters(),
        alone(factor=3, world_size=3),
        op="sum",
    )
    loss_of(model, 1).backward()
    loss_of(plain, 1).backward()
    optimizer.synchronize()
    assert model[0].weight.grad is None
    torch.testing.assert_close(model[0].bias.grad, 3 * plain[0].bias.grad)
    torch.testing.assert_close(model[2].weight.grad, 3 * plain[2].weight.grad)
    torch.testing.assert_close(model[4].weight.grad, plain[4].weight.grad)


def test_distributed_optimizer_lets_another_optimizer_train_what_was_frozen() -> None:
    """As adversarial networks and layers that are unfrozen later do: frozen weights are only compared at the start."""
    model = make_model()
    loss_of(model, 1).backward()
    model[0].requires_grad_(False)
    first = DistributedOptimizer(sgd(model[2:]), model.named_parameters(), alone())
    assert model[0].weight.grad is not None
    model[0].requires_grad_(True)
    second = DistributedOptimizer(sgd(model[0]), model.named_parameters(), alone())
    loss_of(model, 1).backward()
    for optimizer in (first, second):
        optimizer.step()


def test_distributed_optimizer_refuses_what_cannot_be_distributed() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=naming("op='mean'", "average, sum")):
        wrap(model, op="mean")
    with pytest.raises(ValueError, match=naming("backward_passes_per_step=0", "at least 1")):
        wrap(model, backward_passes_per_step=0)
    with pytest.raises(ValueError, match=naming("LBFGS")):
        DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model.named_parameters(), alone())
    named = [(name, p) for name, p in model.named_parameters() if not name.startswith("2")]
    with pytest.raises(ValueError, match=naming("named_parameters", "(4, 7), (4,):", "model.named_parameters()")):
        DistributedOptimizer(sgd(model), named, alone())
    optimizer = wrap(model)
    with pytest.raises(ValueError, match=naming("DistributedOptimizer already")):
        DistributedOptimizer(optimizer, model.named_parameters(), alone())
    with pytest.raises(RuntimeError, match=naming("parameter groups", "DistributedOptimizer")):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


# --- broadcasts and all_reduce on one rank; tests/parallel has them over several ---


def test_broadcast_of_one_rank_goes_to_itself() -> None:
    one, model = alone(), make_model()
    before = copy.deepcopy(model.state_dict())
    broadcast_parameters(model.state_dict(), one)
    broadcast_parameters(model.named_parameters(), one)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    optimizer = sgd(model)
    broadcast_optimizer_state(optimizer, one)
    plain = {"epoch": 3, "best": (0.5, None, [True, "text", b"bytes", 1 << 80]), 4: {"nested"}}
    assert broadcast_object(plain, one) == plain


def test_object_goes_to_the_ranks_that_need_it_and_its_tensors_go_as_they_are() -> None:
    """Rank 1 has it, ranks 0 and 3 take it, rank 2 keeps its own."""
    cl = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    held = {"model": {"w": cl, "n": torch.tensor(3)}, "steps": [torch.empty(0), True, (7, torch.ones(1).expand(2))]}
    post, ones = Post(), {"own": torch.ones(1)}

    def one(rank: int) -> Any:
        transport = transport_over(PostBackend(rank, post), env=replace(ALONE, rank=rank))
        own = make_communicator(transport, "native")
        return send_object(held if rank == 1 else ones, own, source=1, to=[0, 3])

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, range(4)))
    for taken in (found[0], found[3]):
        torch.testing.assert_close(taken, held, rtol=0, atol=0)
        assert taken["model"]["w"].stride() == cl.stride()
        assert taken["model"]["w"].data_ptr() != cl.data_ptr()
    assert found[1] is held
    assert found[2] is ones
    assert {to for _, to in post.messages} == {0, 3}


class RunsCode:
    """What a pickle would call as it is read."""

    ran: ClassVar[list[str]] = []

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return RunsCode.ran.append, ("code",)


def test_broadcast_of_a_state_that_cannot_be_sent_is_refused_on_the_root_too() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for value, reason in ((lambda: None, r"cannot be sent: .*lambda"), (Path("x"), r"holds \S*Path: send numbers")):
        optimizer.param_groups[0]["rule"] = value
        with pytest.raises(ValueError, match=reason):
            broadcast_optimizer_state(optimizer, alone())


def test_broadcast_from_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="root_rank=1 is no rank: there are 1, from 0 on"):
        broadcast_object(1, alone(), root_rank=1)


@pytest.mark.parametrize("value", [RunsCode(), {"deep": [RunsCode()]}, Path("x"), print])
def test_broadcast_object_runs_no_code(value: object) -> None:
    with pytest.raises(ValueError, match=r"a broadcast object holds \S+: send numbers, texts, tensors"):
        broadcast_object(value, alone())
    assert RunsCode.ran == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
def test_all_reduce_returns_a_new_tensor(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 0], [3, 2]]).to(dtype)
    total = all_reduce(tensor.T, alone(), op="sum")
    assert total.dtype == dtype
    assert torch.equal(total, tensor.T)
    assert total.data_ptr() != tensor.data_ptr()


class HostOnly(SingleBackend):
    """Takes down where the tensors are that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        self.seen.append(tensor_N.device.type)

    def broadcast_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        self.seen.append(tensor_N.device.type)

    def start_exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        self.seen += [send.device.type, receive.device.type]
        return InFlight()


def test_broadcast_and_all_reduce_give_host_tensors_to_a_transport_of_those() -> None:
    """The device of the ranks is meta here, where a tensor would lose its content."""
    host, model = HostOnly(), make_model()
    transport = transport_over(host, device="meta", staging=SimpleNamespace())
    ranks = make_communicator(transport, "native")
    assert transport.backend_device == torch.device("cpu")
    assert all_reduce(torch.tensor([1.0, 2.0]), ranks).tolist() == [1.0, 2.0]
    assert broadcast_object({"epoch": 3}, ranks) == {"epoch": 3}
    before = copy.deepcopy(model.state_dict())
    broadcast_parameters(model.state_dict(), ranks)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    time_hops(ranks, (0, 1), 8, count=2)
    assert host.seen == ["cpu"] * (1 + 2 + len(before) + 4)
    assert replace(transport, staging=None).backend_device == torch.device("meta")


def test_averages_in_fp16_are_finite_if_values_are() -> None:
    """For all_reduce() and DDP's hook: the sum over four ranks would overflow."""

    class FourEqual(SingleBackend):
        def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
            tensor_N.mul_(4)

    four = alone(FourEqual(), factor=4, world_size=4)
    large = torch.tensor([40000.0], dtype=torch.float16)
    assert all_reduce(large, four).tolist() == [40000]
    assert all_reduce(large, four, op="sum").tolist() == [torch.inf]
    bucket = SimpleNamespace(buffer=lambda: large, index=lambda: 0)
    assert ddp_comm_hook(four)(None, bucket).wait().tolist() == [40000]  # type: ignore[arg-type]


def test_broadcast_parameters_reaches_tensors_that_are_not_contiguous() -> None:
    class Ones(HostOnly):
        """Rank 0 is elsewhere, and sends bytes of 1."""

        def broadcast_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
            tensor_N.fill_(1)

    tensor = torch.zeros(3, 2, dtype=torch.uint8)
    broadcast_parameters({"transposed": tensor.T, "empty": torch.zeros(0)}, alone(Ones()))
    assert tensor.tolist() == [[1, 1]] * 3


def test_all_reduce_refuses_what_has_no_sum_or_average() -> None:
    with pytest.raises(ValueError, match=naming("op='max'", "average, sum")):
        all_reduce(torch.ones(1), alone(), op="max")
    with pytest.raises(ValueError, match=naming("torch.int64", "tensor.float()", "sum")):
        all_reduce(torch.tensor(3), alone())
    with pytest.raises(ValueError, match=naming("torch.sparse_coo", "tensor.to_dense()")):
        all_reduce(torch.ones(1).to_sparse(), alone())
    for op in ("average", "sum"):
        with pytest.raises(ValueError, match=naming("torch.complex64", "torch.view_as_real(tensor)")):
            all_reduce(torch.tensor([1 + 2j]), alone(), op=op)


MODEL = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda one: all_reduce(3, one), ("tensor", "torch.tensor(1.0)", "3 (int)")),
        (lambda one: all_reduce(torch.ones(1), connect), ("communicator", "connect()", "(function)")),
        (lambda one: one.sum_(0.5, label="loss"), ("tensor", "0.5 (float)")),
        (lambda one: GradientReducer(MODEL, one), ("named_parameters", "model.named_parameters()", "Linear")),
        (lambda one: GradientReducer(MODEL.parameters(), one), ("model.named_parameters()", "Parameter")),
        (lambda one: GradientReducer(MODEL.named_parameters(), "nccl"), ("communicator", "'nccl' (str)")),
        (lambda one: DistributedOptimizer(MODEL, MODEL.named_parameters(), one), ("optimizer", "(Linear)")),
        (lambda one: DistributedOptimizer(sgd(MODEL), MODEL.parameters(), one), ("named_parameters", "Parameter")),
        (lambda one: wrap(MODEL, backward_passes_per_step="2"), ("backward_passes_per_step", "'2' (str)")),
    ],
)
def test_arguments_of_another_type_are_named(call: Callable[[Any], object], named: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match=naming(*named)):
        call(alone())
