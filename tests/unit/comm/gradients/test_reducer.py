"""The gradient reducer on one process: what is started when, and what the gradients are then."""

import copy

import pytest
import torch
from error_texts import naming
from one_rank import RecordingBackend, alone
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch.comm.backends.base import InFlight
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.broadcast import all_reduce, broadcast_parameters
from bigbatch.comm.gradients.distributed_optimizer import DistributedOptimizer
from bigbatch.comm.gradients.exposed_time import ExposedTime
from bigbatch.comm.gradients.grid import Grid
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.errors import CommError


def make_model() -> nn.Sequential:
    """A channels-last convolution and two linear layers: six parameters, one of them of four axes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6), nn.Linear(6, 4)
    )
    return model.to(memory_format=torch.channels_last)


def make_images(num_images: int = 4) -> Tensor:
    return torch.randn(num_images, 3, 6, 6, generator=torch.Generator().manual_seed(num_images))


def loss_of(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    return model(images_BCHW).square().sum()


def plain_gradients(model: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
    twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    for images_BCHW in batches:
        loss_of(twin, images_BCHW).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


SMALL = {"threshold_bytes": 200, "buffer_bytes": 300}
"""Makes several buffers out of make_model(): conv.weight (864 bytes) goes alone, the others share."""


def test_reducer_averages_over_ranks_what_microbatches_add_up() -> None:
    """Four ranks that hold the same: their average is each one's own."""
    model, four = make_model(), alone(factor=4, world_size=4)  # a power of two: no rounding
    reducer = GradientReducer(model.named_parameters(), four, average=True, weights="unchecked", **SMALL)
    expected = plain_gradients(model, make_images(4), make_images(2))
    for is_last, num_images in ((False, 4), (True, 2)):
        reducer.is_active = is_last
        loss_of(model, make_images(num_images)).backward()
    extra_N = torch.ones(1)
    reducer.start_extra(extra_N, label="loss")
    reducer.wait()
    assert_same(model, expected)
    assert extra_N.tolist() == [4.0]  # stays a sum


def test_reducer_average_in_fp16_is_finite_if_gradients_are() -> None:
    """Their sum over ranks, 160,000, would overflow; DistributedDataParallel divides first, too."""
    model = nn.Linear(1, 1, bias=False).half()
    four = alone(factor=4, world_size=4)
    reducer = GradientReducer(model.named_parameters(), four, average=True, weights="unchecked")
    (40000 * model(torch.ones(1, 1).half())).sum().backward()
    reducer.wait()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 40000


def test_reducer_buffers_take_a_parameter_with_gaps_by_its_elements_alone() -> None:
    model = make_model()
    model[4].weight = nn.Parameter(torch.randn(6, 16)[:, ::2])
    expected = plain_gradients(model, make_images())
    reducer = GradientReducer(model.named_parameters(), alone())
    loss_of(model, make_images()).backward()
    reducer.wait()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])  # the copy has other strides: other rounding


def gradients_on_grid(*batches: Tensor, factor: int = 3, scatter: bool = False, **sizes: int) -> dict[str, Tensor]:
    """Return the gradients of the second step, in learned order, of a rank of `factor` ranks with equal batches."""
    model = make_model()
    ranks = alone(factor=factor)
    grid = Grid(3 * len(batches))
    reducer = GradientReducer(model.named_parameters(), ranks, grid=grid, scatter=scatter, **sizes)
    for _ in range(2):
        reducer.zero_grad()
        for k, images_BCHW in enumerate(batches):
            reducer.is_active = k == len(batches) - 1
            loss_of(model, images_BCHW).backward()
            if not reducer.is_active:
                reducer.fold()
        reducer.wait()
    assert reducer.grid_sums.take_beyond() == 0
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_reducer_on_a_grid_has_the_same_bits_in_any_order_and_plan() -> None:
    batches = make_images(4), make_images(2), make_images(3)
    found = gradients_on_grid(*batches)
    plain = plain_gradients(make_model(), *batches)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, 3 * plain[name], rtol=1e-5, atol=1e-7)
    for order in (batches[1:] + batches[:1], batches[::-1]):
        others = gradients_on_grid(*order, **SMALL)
        assert all(torch.equal(others[name], gradient) for name, gradient in found.items())


def test_reducer_folds_no_gradients_of_an_earlier_step() -> None:
    """torch's zero_grad() sets gradients to None, so a microbatch may leave one's place as it was."""
    reached, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    reducer = GradientReducer([("reached", reached), ("other", other)], alone(), grid=Grid(2))
    for _ in range(2):
        torch.optim.SGD([reached, other]).zero_grad()
        reducer.is_active = False
        reached.sum().backward()
        reducer.fold()
        reducer.is_active = True
        (reached + other).sum().backward()
        reducer.wait()
        assert (reached.grad, other.grad) == (torch.tensor([2.0]), torch.tensor([1.0]))


def test_reducer_counts_what_is_beyond_the_grid() -> None:
    model = make_model()
    reducer = GradientReducer(model.named_parameters(), alone(), grid=Grid(1))
    reducer.is_active = False  # gradients are looked at between backward and their sum
    (1e6 * loss_of(model, make_images())).backward()
    num_large = sum(int((p.grad.abs() > 4096).sum()) for p in model.parameters() if p.grad is not None)
    own = reducer.grid_sums.own_counts = []
    reducer.wait()
    assert num_large > 0
    assert sum(map(int, own)) == num_large
    assert len(own) == len(reducer.buffers)
    assert reducer.grid_sums.take_beyond() == num_large
    assert reducer.grid_sums.take_beyond() == 0
    assert all(p.grad is not None and p.grad.isinf().all() for p in model.parameters())


def test_reducer_counts_what_the_grid_takes_for_zero_of_each_microbatch() -> None:
    model = make_model()
    grid = Grid(2, fraction_bits=8)
    reducer = GradientReducer(model.named_parameters(), alone(), grid=grid)
    expected = [0, 0]
    for k, images_BCHW in enumerate((make_images(4), make_images(2))):
        reducer.is_active = k == 1
        reducer.grid_sums.counts_underflow = True
        (single := make_model()).load_state_dict(model.state_dict())
        for gradient in plain_gradients(single, images_BCHW).values():
            expected[0] += int(((gradient != 0) & (gradient.abs() <= 2.0**-9)).sum())
            expected[1] += int((gradient != 0).sum())
        loss_of(model, images_BCHW).backward()
        if not reducer.is_active:
            reducer.fold()
    reducer.wait()
    assert reducer.grid_sums.take_underflow() == tuple(expected)
    assert 0 < expected[0] < expected[1]
    assert reducer.grid_sums.take_underflow() == (0, 0)
    reducer.grid_sums.counts_underflow = False
    loss_of(model, make_images(2)).backward()
    reducer.wait()
    assert reducer.grid_sums.take_underflow() == (0, 0)


def test_reducer_scatters_from_a_grid_what_it_sums_there() -> None:
    """What is beyond it is counted on all ranks, and travels apart (three ranks sum the counts alone here)."""
    batches = make_images(4), make_images(2)
    expected = gradients_on_grid(*batches, factor=1)
    found = gradients_on_grid(*batches, factor=1, scatter=True, **SMALL)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    model = make_model()
    reducer = GradientReducer(model.named_parameters(), alone(factor=3), grid=Grid(3), scatter=True)
    reducer.is_active = False  # gradients are changed between backward and their sum
    for _ in range(2):
        reducer.zero_grad()
        loss_of(model, make_images()).backward()
        first = next(iter(model.parameters()))
        assert first.grad is not None
        first.grad[:1].fill_(torch.nan)
        reducer.wait()
        assert reducer.grid_sums.take_beyond() == 3 * first[:1].numel()
        assert first.grad.isinf().all()


def test_reducer_buffers_start_during_backward_in_the_order_of_the_plan() -> None:
    model, backend = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))), RecordingBackend()
    model[0].weight.register_post_accumulate_grad_hook(lambda _: backend.events.append("gradient of layer 0"))
    sizes = {"threshold_bytes": 64, "buffer_bytes": 64}
    reducer = GradientReducer(model.named_parameters(), alone(backend), **sizes, learn_order=False)
    loss_of(model, torch.ones(2, 4)).backward()
    labels = [f"all-reduce of buffer {i} ({3 - i}.weight, 6.4e-05 MB float32)" for i in range(4)]
    assert backend.events == [*labels[:3], "gradient of layer 0", labels[3]]
    reducer.wait()
    assert len(backend.events) == 5  # nothing was left to start


class Branches(nn.Module):
    """Two layers; a forward takes one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(3, 3)
        self.late = nn.Linear(3, 3)
        self.use_late = True

    def forward(self, input_BC: Tensor) -> Tensor:
        hidden_BC = self.early(input_BC)
        return self.late(hidden_BC) if self.use_late else hidden_BC


@pytest.mark.parametrize("set_to_none", [False, True])
def test_reducer_counts_a_parameter_without_a_gradient_as_zero(set_to_none: bool) -> None:
    model, backend = Branches(), RecordingBackend()
    one_per_buffer = {"threshold_bytes": 1, "buffer_bytes": 1}
    reducer = GradientReducer(model.named_parameters(), alone(backend), **one_per_buffer)
    input_BC = torch.ones(2, 3)
    loss_of(model, input_BC).backward()
    reducer.wait()
    labels = list(backend.events)
    assert all(p.grad.any() for p in model.late.parameters())

    model.zero_grad(set_to_none=True) if set_to_none else reducer.zero_grad()
    model.use_late = False
    loss_of(model, input_BC).backward()
    assert backend.events == labels  # the buffers of late come first in the plan, so that nothing could start
    reducer.wait()
    assert backend.events == [*labels, *labels]
    assert all(not p.grad.any() for p in model.late.parameters())
    assert all(p.grad.any() for p in model.early.parameters())


def test_reducer_zeroes_gradients_that_were_replaced_after_wait() -> None:
    """As by clipping out of place: the next step must not add to them."""
    model = make_model()
    expected = plain_gradients(model, make_images())
    reducer = GradientReducer(model.named_parameters(), alone(), **SMALL)
    for _ in range(3):
        loss_of(model, make_images()).backward()
        reducer.wait()
        assert_same(model, expected)
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
        reducer.zero_grad()


def test_reducer_brings_home_gradients_set_to_none_or_replaced() -> None:
    model = make_model()
    reducer = GradientReducer(model.named_parameters(), alone(), **SMALL, learn_order=False)
    homes = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
    expected = plain_gradients(model, make_images())
    for spoil in (lambda p: None, torch.zeros_like):
        for parameter in model.parameters():
            parameter.grad = spoil(parameter)
        loss_of(model, make_images()).backward()
        reducer.wait()
        assert_same(model, expected)
        assert {name: p.grad.data_ptr() for name, p in model.named_parameters()} == homes
        reducer.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_reducer_buffers_keep_no_graph_of_gradients_that_have_one() -> None:
    model = make_model()
    expected = plain_gradients(model, make_images())
    reducer = GradientReducer(model.named_parameters(), alone(), **SMALL)
    loss_of(model, make_images()).backward(create_graph=True)
    reducer.wait()
    assert not any(buffer_N.requires_grad for buffer_N in reducer.buffers)
    assert_same(model, expected)


def test_reducer_is_whole_after_a_backward_that_failed() -> None:
    def fail(_: Tensor) -> None:
        raise OverflowError

    model = make_model()
    expected = plain_gradients(model, make_images())
    reducer = GradientReducer(model.named_parameters(), alone(), **SMALL)
    hook = model[0].weight.register_hook(fail)
    with pytest.raises(OverflowError):
        loss_of(model, make_images()).backward()
    hook.remove()
    reducer.wait()
    reducer.zero_grad()
    loss_of(model, make_images()).backward()
    reducer.wait()
    assert_same(model, expected)


def test_wait_sums_what_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may catch the error of a step, such as one without memory."""
    model = make_model()
    reducer = GradientReducer(model.named_parameters(), alone(), learn_order=False, **SMALL)
    start, started = reducer._start_sum, list[str]()

    def fail(buffer_N: Tensor, *, label: str) -> InFlight:
        monkeypatch.setattr(reducer, "_start_sum", start_noted)
        raise MemoryError

    def start_noted(buffer_N: Tensor, *, label: str) -> InFlight:
        started.append(label)
        return start(buffer_N, label=label)

    monkeypatch.setattr(reducer, "_start_sum", fail)
    with pytest.raises(MemoryError):
        loss_of(model, make_images()).backward()
    reducer.wait()
    assert len(started) == len(reducer.buffers) > 1


def test_parameter_that_an_earlier_microbatch_used_counts_as_reached() -> None:
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    reducer = GradientReducer(nn.ModuleList([one, other]).named_parameters(), alone(), unused="error")
    for _ in range(2):
        reducer.is_active = False
        one(torch.ones(1, 2)).sum().backward()
        reducer.is_active = True
        other(torch.ones(1, 2)).sum().backward()
        reducer.wait()
        reducer.zero_grad()
    one(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"no gradient to 1\.bias, 1\.weight"):
        reducer.wait()


class Crossed(nn.Module):
    """Layers that are used in another order than they are made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.second = nn.Linear(4, 4, bias=False)
        self.third = nn.Linear(4, 4, bias=False)
        self.first = nn.Linear(4, 4, bias=False)

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.third(self.second(self.first(x_BC)))


def test_reducer_learns_the_order_of_readiness_in_the_first_step() -> None:
    model, backend = Crossed(), RecordingBackend()
    reducer = GradientReducer(model.named_parameters(), alone(backend), threshold_bytes=1, buffer_bytes=1)
    images_BC = torch.randn(2, 4)
    for _ in range(2):
        expected = plain_gradients(model, images_BC)
        loss_of(model, images_BC).backward()
        reducer.wait()
        assert_same(model, expected)  # also of the step after which the buffers moved
        for index, parameter in ((0, model.third.weight), (2, model.first.weight)):
            assert parameter.grad.data_ptr() == reducer.buffers[index].data_ptr()
        reducer.zero_grad()
    assert [label.split("(")[1].split(",")[0] for label in backend.events] == [
        *("first.weight", "third.weight", "second.weight"),  # in the guessed order
        *("third.weight", "second.weight", "first.weight"),
    ]


def test_reducer_learns_from_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gets what all ranks give: lists of all ranks would be quadratic in ranks."""
    model, given, learned = nn.Linear(2, 2), list[object](), [["weight", 1], ["bias", 1]]
    monkeypatch.setattr(Communicator, "gather", lambda self, value: (given.append(value), [learned, value])[1])
    monkeypatch.setattr(Communicator, "rank", 1)
    reducer = GradientReducer(model.named_parameters(), alone(world_size=2), weights="unchecked")
    loss_of(model, torch.ones(1, 2)).backward()
    reducer.wait()
    assert given == [None]
    assert reducer.order == ["weight", "bias"]


def test_reducer_can_refuse_unused_parameters() -> None:
    model = Branches()
    reducer = GradientReducer(model.named_parameters(), alone(), unused="error")
    model.use_late = False
    model(torch.ones(1, 3)).sum().backward()
    named = naming(" late.bias, late.weight:", "requires_grad_(False)", 'unused="zero"')
    with pytest.raises(RuntimeError, match=named):
        reducer.wait()


@pytest.mark.parametrize(
    ("named_parameters", "named"),
    [
        ([], ("no parameter", "frozen")),
        ([*nn.Linear(2, 2).named_parameters(), *nn.Linear(2, 2).named_parameters()], ("'weight'", "prefix")),
        (nn.Linear(2, 2, device="meta").named_parameters("1"), ("1.weight", "on meta", "on cpu", "model.to(")),
    ],
)
def test_reducer_refuses_what_it_cannot_sum(
    named_parameters: list[tuple[str, nn.Parameter]], named: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=naming(*named)):
        GradientReducer(named_parameters, alone())


@pytest.mark.parametrize(
    ("dtype", "grid", "named"),
    [
        (torch.complex64, None, ("weight is torch.complex64", "sums only float64, float32, ")),
        (torch.float8_e4m3fn, None, ("weight is torch.float8_e4m3fn", "float16")),
        (torch.complex64, Grid(1), ("weight is torch.complex64", "grid=")),
        (torch.float64, Grid(1), ("weight is torch.float64", "grid=, sums only float32, float16, bfloat16:")),
    ],
)
def test_reducer_refuses_a_dtype_that_is_not_summed(
    dtype: torch.dtype, grid: Grid | None, named: tuple[str, ...]
) -> None:
    parameter = nn.Parameter(torch.zeros(2).to(dtype))
    with pytest.raises(ValueError, match=naming(*named)):
        GradientReducer([("weight", parameter)], alone(), grid=grid)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_reducer_with_activation_checkpointing(use_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    images_BC = torch.randn(3, 4, requires_grad=True)
    expected = plain_gradients(model, images_BC)
    reducer = GradientReducer(model.named_parameters(), alone(), threshold_bytes=1, buffer_bytes=1)
    for _ in range(2):
        hidden_BC = checkpoint(model[:3], images_BC, use_reentrant=use_reentrant)
        model[3:](hidden_BC).square().sum().backward()
        reducer.wait()
        assert_same(model, expected)
        reducer.zero_grad()


@pytest.mark.parametrize("num_backwards", [1, 2])
def test_reducer_learns_how_often_backward_adds_to_a_gradient(num_backwards: int) -> None:
    """A block used three times under checkpoints that re-enter backward, and several backwards per step."""
    model, backend = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), RecordingBackend()
    images_BC = torch.randn(3, 4, requires_grad=True)

    def backward(network: nn.Module, **how: bool) -> None:
        hidden_BC = images_BC
        for _ in range(3):
            hidden_BC = checkpoint(network[0], hidden_BC, **how) if how else network[0](hidden_BC)
        network[1](hidden_BC).square().sum().backward()

    twin = copy.deepcopy(model)
    for _ in range(num_backwards):
        backward(twin)
    expected = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    reducer = GradientReducer(model.named_parameters(), alone(backend), threshold_bytes=1)
    for step in range(3):
        for k in range(num_backwards):
            assert len(backend.events) == 4 * step, "nothing starts before the last backward"
            backward(model, use_reentrant=True)
            assert len(backend.events) == 4 * (step + (step > 0 and k == num_backwards - 1))
        reducer.wait()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name])
        reducer.zero_grad()
    backward(model, use_reentrant=True)
    if num_backwards == 1:
        with pytest.raises(RuntimeError, match=naming("backward reached", "is_active", "use_reentrant=False")):
            backward(model, use_reentrant=True)


def test_reducers_of_two_networks_train_like_the_networks_alone() -> None:
    """A GAN, whose generator's backward goes through the discriminator, with a metric between backward and wait()."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({"g": nn.Linear(2, 3), "d": nn.Linear(3, 1)})
    twin, ranks = copy.deepcopy(plain), alone(RecordingBackend())
    reducers = {name: GradientReducer(net.named_parameters(), ranks) for name, net in twin.items()}
    for networks in (plain, twin):
        noise = torch.Generator().manual_seed(1)
        optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for name, net in networks.items()}
        for _ in range(3):
            for name in ("d", "g"):
                (reducers if networks is twin else optimizers)[name].zero_grad()
                fake_BC = networks["g"](torch.randn(4, 2, generator=noise))
                score_B1 = networks["d"](fake_BC.detach() if name == "d" else fake_BC)
                (score_B1 if name == "d" else -score_B1).square().sum().backward()
                if networks is twin:
                    ranks.sum_(torch.ones(9), label="metric")
                    reducers[name].wait()
                optimizers[name].step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), twin.parameters(), strict=True))


def test_reducer_starts_what_it_holds_before_another_operation() -> None:
    """The last layer is not used: on a rank that uses it the first buffer starts during backward."""
    model, backend = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), RecordingBackend()
    ranks = alone(backend)
    reducer = GradientReducer(model.named_parameters(), ranks, threshold_bytes=1, learn_order=False)
    ranks.sum_(torch.ones(1), label="before backward")
    model[0](torch.ones(1, 4)).sum().backward()
    all_reduce(torch.ones(1), ranks, label="a metric")
    reducer.wait()
    broadcast_parameters(model.named_parameters(), ranks)
    assert [label.split(" (")[0] for label in backend.events] == [
        "before backward",
        *(f"all-reduce of buffer {k}" for k in range(2)),
        "a metric",
        "broadcast of 2 tensors from rank 0",
    ]


@pytest.mark.parametrize("num_open", [1, 2])
def test_reducer_is_one_of_several_until_the_others_are_closed(num_open: int) -> None:
    model, backend = make_model(), RecordingBackend()
    ranks = alone(backend)
    reducer = GradientReducer(model.named_parameters(), ranks, learn_order=False)
    other = GradientReducer(make_model().named_parameters(), ranks.with_algorithm("native"))
    if num_open == 1:
        other.close()
    loss_of(model, make_images()).backward()
    assert bool(backend.events) == (num_open == 1)
    reducer.wait()
    assert len(backend.events) == len(reducer.buffers)
    if num_open == 2:  # transports compare labels: waits in another order must not mix sums of equal models
        other.wait()
        assert len({*backend.events}) == len(reducer.buffers) + len(other.buffers)


CHANGES = {
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clip by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "in place": lambda model: model[0].weight.grad.mul_(2),
    "without autograd": lambda model: torch.inference_mode()(model[0].weight.grad.mul_)(2),
    "replaced": lambda model: setattr(model[0].weight, "grad", torch.ones_like(model[0].weight)),
    "foreach": lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_open_twice", [False, True])
def test_reducer_refuses_gradients_that_change_before_wait(change: str, is_open_twice: bool) -> None:
    """Sums are done here when backward ends; with a second reducer they have not started."""
    model, ranks = make_model(), alone()
    reducer = GradientReducer(model.named_parameters(), ranks)
    if is_open_twice:
        GradientReducer(make_model().named_parameters(), ranks)
    for _ in range(2):
        loss_of(model, make_images()).backward()
        CHANGES[change](model)
        with pytest.raises(CommError, match=naming("between backward and wait()", "is_active = False")):
            reducer.wait()
        reducer.zero_grad()
    model.zero_grad(set_to_none=False)  # before backward a script may do as it likes
    loss_of(model, make_images()).backward()
    reducer.wait()
    CHANGES[change](model)


def test_optimizer_and_scaler_refuse_gradients_that_were_not_summed() -> None:
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=2.0)
    reducer, optimizer = GradientReducer(model.named_parameters(), alone()), torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    for is_active in (True, False):
        reducer.is_active = is_active
        scaler.scale(loss_of(model, make_images())).backward()
        for act in (optimizer.step, lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer)):
            with pytest.raises(CommError, match=naming("SGD", "not summed", "wait()")):
                act()
        optimizer.zero_grad()
        optimizer.step()  # there is nothing to update
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    scaler.scale(loss_of(model, make_images())).backward()
    reducer.wait()
    scaler.step(optimizer)
    with pytest.raises(CommError, match=naming("SGD", "not summed", "wait()", "closure")):
        optimizer.step(lambda: loss_of(model, make_images()).backward())  # too late for this step, but not silent


@pytest.mark.long
def test_compiled_step_refuses_gradients_that_were_not_summed() -> None:
    model = make_model()
    reducer, optimizer = GradientReducer(model.named_parameters(), alone()), torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    loss_of(model, make_images()).backward()
    reducer.wait()
    step()
    loss_of(model, make_images()).backward()
    with pytest.raises(CommError, match="not summed"):
        step()


@pytest.mark.long
@pytest.mark.parametrize("wraps", [True, False])
def test_whole_step_under_the_compiler_is_the_step(wraps: bool) -> None:
    """The compiler would trace the sums, and with them the version counters of the gradients."""

    def train(is_compiled: bool) -> dict[str, Tensor]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if wraps:
            optimizer = DistributedOptimizer(optimizer, model.named_parameters(), alone())
        reducer = None if wraps else GradientReducer(model.named_parameters(), alone())

        def step(images: Tensor) -> None:
            loss_of(model, images).backward()
            if reducer is not None:
                reducer.wait()
            optimizer.step()
            (optimizer if reducer is None else reducer).zero_grad()

        for _ in range(3):
            (torch.compile(step, backend="aot_eager") if is_compiled else step)(make_images())
        return model.state_dict()

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)


@pytest.mark.parametrize("is_active", [True, False])
def test_reducer_refuses_a_second_backward_or_zeros_before_wait(is_active: bool) -> None:
    model = make_model()
    reducer = GradientReducer(model.named_parameters(), alone(), learn_order=False)
    loss_of(model, make_images()).backward()
    reducer.is_active = is_active
    with pytest.raises(RuntimeError, match=r" 5\.\w+ .*wait\(\).*is_active"):
        loss_of(model, make_images()).backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\).*wait\(\)"):
        reducer.zero_grad()
    reducer.wait()
    reducer.zero_grad()
    assert not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("of_average", [False, True])
def test_reducer_refuses_a_second_wait_and_lets_a_rank_have_no_images(of_average: bool) -> None:
    """A rank has averages of its own part alone after a reduce-scatter."""
    model, kind = make_model(), {"average": of_average, "scatter": of_average}
    reducer = GradientReducer(model.named_parameters(), alone(factor=2), **kind, **SMALL)
    zeros = (reducer.zero_grad, model.zero_grad, lambda: torch._foreach_zero_([p.grad for p in model.parameters()]))
    for zero in zeros:
        loss_of(model, make_images()).backward()
        reducer.wait()
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        with pytest.raises(RuntimeError, match=naming("second wait()", "once per step")):
            reducer.wait()
        assert_same(model, before)
        zero()
        reducer.wait()
        assert not any(p.grad.any() for p in model.parameters())


def test_reducer_closes_once_and_then_sums_no_more() -> None:
    model, ranks = make_model(), alone()
    reducer = GradientReducer(model.named_parameters(), ranks)
    reducer.close()
    reducer.close()
    loss_of(model, make_images()).backward()
    with pytest.raises(RuntimeError, match=naming("closed", "new one")):
        reducer.wait()
    GradientReducer(model.named_parameters(), ranks).wait()


def test_exposed_seconds_on_the_host_are_those_of_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr("bigbatch.comm.gradients.exposed_time.time.perf_counter", lambda: next(now))
    exposed = ExposedTime()
    for _ in range(2):
        with exposed.measure([torch.zeros(1)]):
            pass
    assert exposed.take_seconds() == 0.75
    assert exposed.take_seconds() == 0.0


class _Event:
    """A CUDA event that was recorded at some millisecond and has been reached or not."""

    def __init__(self, milliseconds: float, *, is_reached: bool) -> None:
        self.milliseconds, self.is_reached = milliseconds, is_reached

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True

    def elapsed_time(self, end: "_Event") -> float:
        return end.milliseconds - self.milliseconds


def test_exposed_seconds_on_a_gpu_are_read_late_and_pile_up_no_events() -> None:
    exposed = ExposedTime()
    for i in range(100):
        exposed.add_events(_Event(0, is_reached=True), _Event(5, is_reached=i < 98))
    assert len(exposed._events) == 2  # only what the device has not reached yet
    assert exposed.take_seconds() == pytest.approx(0.5)
    assert exposed.take_seconds() == 0.0


def test_reducer_agrees_on_parameters_sizes_and_the_choice_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one rank would broadcast while another compares."""
    one, agreed = alone(RecordingBackend()), list[str]()
    monkeypatch.setattr(Communicator, "agree", lambda self, what, text: agreed.append(text))
    for weights in ("equal", "broadcast", "unchecked"):
        GradientReducer(make_model().named_parameters(), one, weights=weights).close()
    assert len(set(agreed)) == 3
    sizes = {"threshold_bytes": 1000, "buffer_bytes": 128, "first_buffer_bytes": 64}
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))
    reducer = GradientReducer(model.named_parameters(), one, **sizes)
    assert "0.weight (4, 4) torch.float32\n" in agreed[-1]
    assert "threshold_bytes=1000, buffer_bytes=128, first_buffer_bytes=64" in agreed[-1]
    assert [buffer.num_bytes for buffer in reducer.plan.buffers] == [64, 128, 128]
