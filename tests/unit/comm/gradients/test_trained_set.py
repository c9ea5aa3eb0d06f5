"""What is trained changes after a reducer was made: refused by name, in wait(), step() or backward, or followed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from error_texts import naming
from one_rank import alone
from thread_ranks import Meeting
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from bigbatch.comm.backends.base import ALL_DTYPES
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients import trained_set
from bigbatch.comm.gradients.distributed_optimizer import DistributedOptimizer
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.gradients.trained_set import TrainedSet
from bigbatch.errors import CommError

Step = Callable[[], object]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def backward(model: nn.Module) -> None:
    parameter = next(model.parameters())
    model(torch.ones(2, 3, dtype=parameter.dtype)).square().sum().backward()


def with_reducer(model: nn.Module, ranks: Communicator) -> Step:
    optimizer, reducer = sgd(model), GradientReducer(model.named_parameters(), ranks)

    def step() -> None:
        backward(model)
        reducer.wait()
        optimizer.step()
        reducer.zero_grad()

    return step


def with_distributed_optimizer(model: nn.Module, ranks: Communicator) -> Step:
    optimizer = DistributedOptimizer(sgd(model), model.named_parameters(), ranks)

    def step() -> None:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


WAYS = [with_reducer, with_distributed_optimizer]


def resize_(model: nn.Module) -> None:
    model[2].weight.data, model[2].bias.data = torch.ones(1, 4), torch.ones(1)


CHANGES: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "unfreeze": (lambda m: m[0].requires_grad_(True), " 0.weight has requires_grad=True, which was False"),
    "freeze all": (lambda m: m.requires_grad_(False), " 1.weight has requires_grad=False, which was True"),
    "half": (lambda m: m.half(), " 2.bias has dtype=torch.float16, which was torch.float32"),
    "double without gradients": (lambda m: (m.zero_grad(), m.double()), "dtype=torch.float64, which was torch.float32"),
    "resize": (resize_, " has shape=torch.Size([1"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.*does not require grad")
def test_trained_set_that_changes_is_refused_by_name(
    change: str, way: Callable[[nn.Module, Communicator], Step]
) -> None:
    model = make_model()
    step = way(model, alone())
    step()
    act, words = CHANGES[change]
    act(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if change == "freeze all":  # backward itself has nothing to do then
        model[0].register_forward_pre_hook(lambda _, args: args[0].requires_grad_())
    with pytest.raises(CommError, match=naming(words, " close() the GradientReducer or DistributedOptimizer ")):
        step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].half().float(),  # frozen weights are not a concern of a sum
        lambda m: m.double().float(),
        lambda m: [setattr(p, "data", p.data.clone()) for p in m.parameters()],
        lambda m: [setattr(p, "grad", None) for p in m.parameters()],
        lambda m: m.requires_grad_(False)[1:].requires_grad_(True),
        lambda m: m.load_state_dict(m.state_dict(), assign=False),
    ],
)
def test_trained_set_whose_memory_moves_is_followed(
    change: Callable[[nn.Module], object], way: Callable[[nn.Module, Communicator], Step]
) -> None:
    """model.double() moves gradients out of their buffers, and leaves the tensors that show them the same objects."""
    model, plain = make_model(), make_model()
    step, reference = way(model, alone(factor=3)), sgd(plain)
    for k in range(3):
        if k == 1:
            change(model)
            change(plain)
        step()
        backward(plain)
        for p in plain.parameters():
            if p.grad is not None:
                p.grad.mul_(3)
        reference.step()
        reference.zero_grad()
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected)


def test_trained_set_names_a_gradient_that_was_replaced_while_it_travelled() -> None:
    model = make_model()
    reducer = GradientReducer(model.named_parameters(), alone())
    backward(model)
    model[2].weight.grad = torch.zeros_like(model[2].weight)
    with pytest.raises(CommError, match=naming(" 2.weight ", "wait()", "is_active = False")):
        reducer.wait()
    reducer.is_active = False
    reducer.zero_grad()
    backward(model)
    model[2].weight.grad = torch.full_like(model[2].weight, 5.0)
    reducer.wait()
    assert model[2].weight.grad.eq(5).all()


def replace_all(model: nn.Sequential) -> None:
    model[1], model[2] = nn.Linear(4, 4), nn.Linear(4, 2)


REPLACED: dict[str, Callable[[nn.Sequential], object]] = {
    "a layer": lambda m: m.__setitem__(1, nn.Linear(4, 4)),
    "a layer by none": lambda m: m.__setitem__(1, nn.Identity()),
    "a parameter": lambda m: setattr(m[1], "weight", nn.Parameter(torch.ones(4, 4))),
    "a parameter by another's": lambda m: setattr(m[1], "bias", m[0].bias),
    "all": replace_all,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("act", REPLACED.values(), ids=REPLACED)
@pytest.mark.filterwarnings("ignore:.*does not require grad")
def test_trained_set_of_which_something_is_replaced_is_refused_by_name(
    act: Callable[[nn.Sequential], object], way: Callable[[nn.Module, Communicator], Step]
) -> None:
    """Whether an optimizer knows what came instead or not: a layer of each rank's own seed would differ unseen."""
    model = make_model()
    step = way(model, alone())
    step()
    act(model)
    with pytest.raises(CommError, match=naming("parameter 1.", " replaced ", " close() the GradientReducer ")):
        step()


@pytest.mark.parametrize(
    "act",
    [
        lambda m: (old := m[1], m.__setitem__(1, nn.Identity()), m.__setitem__(1, old)),  # for an evaluation
        lambda m: m.__setitem__(1, nn.Sequential(m[1], nn.Identity())),
        lambda m: (other := nn.Module(), setattr(other, "net", m[1]), setattr(other, "net", nn.Linear(1, 1))),
        lambda m: m.append(nn.Identity()),
    ],
)
def test_trained_set_that_is_wrapped_or_put_back_is_the_same(act: Callable[[nn.Sequential], object]) -> None:
    model = make_model()
    step = with_reducer(model, alone())
    step()
    act(model)
    step()


def test_trained_set_that_an_optimizer_goes_beyond_is_refused_by_its_step() -> None:
    """Layers that are added, and frozen ones that the reducer was not given: it cannot know them otherwise."""
    model = make_model()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer, reducer = sgd(model), GradientReducer(named, alone())

    def step() -> None:
        backward(model)
        reducer.wait()
        optimizer.step()

    step()
    model[0].requires_grad_(True)
    before = model[2].weight.detach().clone()
    refused = naming("SGD", "(4, 3)", "1 more", " close() the GradientReducer ")
    with pytest.raises(CommError, match=refused):
        step()
    assert torch.equal(model[2].weight, before)
    model[0].requires_grad_(False)
    model[0].zero_grad()
    step()
    model.append(nn.Linear(2, 2, bias=False))
    step()  # its weights do not move yet
    optimizer.add_param_group({"params": model[3].parameters()})
    with pytest.raises(CommError, match=naming("SGD", "(2, 2)")):
        step()
    reducer.close()
    reducer = GradientReducer(model.named_parameters(), alone())
    step()


def test_trained_set_lets_several_reducers_share_an_optimizer_and_others_be() -> None:
    model, own = make_model(), nn.Linear(2, 2)
    parts = [list(model[k].named_parameters(str(k))) for k in (1, 2)]
    reducers = [GradientReducer(part, alone()) for part in parts]
    optimizer = sgd(model)
    backward(model)
    own(torch.ones(2)).sum().backward()
    for reducer in reducers:
        reducer.wait()
    optimizer.step()
    sgd(own).step()  # of this rank alone
    reducers[0].close()
    with pytest.raises(CommError, match=naming("SGD", "(4, 4)", "1 more")):
        optimizer.step()
    reducers[1].close()
    optimizer.step()


def test_trained_set_lets_an_optimizer_update_masters_of_half_precision_parameters() -> None:
    model = make_model()
    model[1].to(torch.bfloat16)
    reducer = GradientReducer(model.named_parameters(), alone())
    masters = [nn.Parameter(p.detach().float()) for p in model[1].parameters()]
    for p in (*masters, *model[2].parameters()):
        p.grad = torch.ones_like(p)
    torch.optim.SGD([*masters, *model[2].parameters()], lr=0.1).step()
    reducer.close()


@pytest.mark.parametrize("way", WAYS)
def test_trained_set_belongs_to_one_reducer_at_a_time(way: Callable[[nn.Module, Communicator], Step]) -> None:
    """Two would sum each gradient twice, or while the other is at it."""
    model = make_model()
    reducer = GradientReducer(model.named_parameters(), alone())
    with pytest.raises(ValueError, match=naming(" 1.weight ", "close()")):
        way(model, alone())
    reducer.close()
    way(model, alone())()


@pytest.mark.parametrize("freeze_first", [True, False])
def test_trained_set_made_anew_leaves_frozen_weights_still(freeze_first: bool) -> None:
    model = make_model()
    optimizer, reducer = sgd(model), GradientReducer(model.named_parameters(), alone())
    backward(model)
    reducer.wait()
    optimizer.step()
    reducer.zero_grad()
    if freeze_first:
        model[1].requires_grad_(False)
        reducer.close()
    else:
        reducer.close()
        model[1].requires_grad_(False)
    reducer = GradientReducer(model.named_parameters(), alone())
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        backward(model)
        reducer.wait()
        optimizer.step()
        reducer.zero_grad()
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == [False] * 4 + [True] * 2


def test_trained_set_that_changes_on_one_rank_alone_keeps_no_other_rank_waiting(monkeypatch: Any) -> None:
    """Two threads that sum by a barrier: the rank that refuses has taken part in the sums of this step."""
    meeting = Meeting(2)
    monkeypatch.setattr(Communicator, "gather", lambda self, value: [value, value])

    def of_rank(rank: int) -> list[str]:
        def all_reduce_(tensor_N: Tensor) -> None:
            tensor_N.copy_(sum(meeting.exchange(rank, tensor_N.clone())))

        model = make_model()
        reducer = GradientReducer(model.named_parameters(), replace(alone(), all_reduce_=all_reduce_))
        said = []
        for k in range(2):
            if (rank, k) == (1, 1):
                model[1].bias.requires_grad_(False)
            backward(model)
            try:
                reducer.wait()
            except CommError as error:
                said.append(str(error))
            reducer.zero_grad()
        return said

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(of_rank, range(2))
    assert first == []
    assert [text.split(" has ")[0] for text in second] == ["parameter 1.bias"]


def test_parameter_of_two_names_is_refused() -> None:
    """As model.named_parameters(remove_duplicate=False) gives tied weights: its buffer would have two places for it."""
    tied = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=naming("0.weight", "1.weight")):
        GradientReducer(nn.Sequential(tied, tied).named_parameters(remove_duplicate=False), alone())


def test_hooks_of_torch_go_with_the_last_watched_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_set, "_watched", WeakSet())
    monkeypatch.setattr(trained_set, "_hooks", [])

    def hooks() -> tuple[object, ...]:
        registered = (
            *(_global_optimizer_pre_hooks, _global_optimizer_post_hooks),
            *(torch_modules._global_parameter_registration_hooks, torch_modules._global_module_registration_hooks),
        )
        return (torch.amp.GradScaler.unscale_, *map(len, registered))

    before = hooks()
    for _ in range(2):
        one, other = (
            TrainedSet(nn.Linear(2, 2).named_parameters(), device=torch.device("cpu"), dtypes=ALL_DTYPES)
            for _ in range(2)
        )
        one.watch()
        watching = hooks()
        assert all(a != b for a, b in zip(before, watching, strict=True))
        other.watch()
        one.close()
        assert hooks() == watching
        other.close()
        assert hooks() == before
