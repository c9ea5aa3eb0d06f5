"""Ranks that start from other weights are named, with the first tensor that differs; or get rank 0's."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from one_rank import alone
from thread_ranks import Meeting
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients import broadcast, distributed_optimizer, reducer
from bigbatch.comm.gradients.distributed_optimizer import DistributedOptimizer
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.gradients.same_start import require_same_start_
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import CommError


def weights(*, odd: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    named = {"first": torch.ones(3), "second": torch.linspace(0, 1, 12).view(3, 4).T.to(dtype), "scale": torch.ones(())}
    if odd:
        named["second"][1, 2] = torch.nextafter(named["second"][1, 2].float(), torch.tensor(2.0))
    return named


def begin(num_ranks: int, odd: set[int]) -> tuple[list[str], int]:
    """Return the error of each rank (a thread), and the number of values that they exchanged."""
    meeting, given = Meeting(num_ranks), list[object]()

    def one(rank: int) -> str:
        def gather(value: object) -> list[Any]:
            given.append(value)
            return meeting.exchange(rank, value)

        communicator: Any = SimpleNamespace(rank=rank, world_size=num_ranks, gather=gather, gather_text=gather)
        try:
            require_same_start_(weights(odd=rank in odd), communicator, weights="equal")
        except CommError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks))), len(given)


@pytest.mark.parametrize(
    ("num_ranks", "odd", "named"),
    [
        (3, {0}, "rank 0 has other weights than rank 1, first second: "),
        (5, {1, 4}, "ranks 1, 4 have other weights than rank 0, first second: "),
        (2, {1}, "rank 1 has other weights than rank 0, first second: "),
    ],
)
def test_same_start_names_the_odd_ranks_and_the_first_tensor(num_ranks: int, odd: set[int], named: str) -> None:
    told = set(begin(num_ranks, odd)[0])
    assert len(told) == 1
    assert named in told.pop()


def test_same_start_of_equal_ranks_takes_one_exchange() -> None:
    assert begin(3, set()) == (["", "", ""], 3)


def test_same_start_broadcasts_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(broadcast, "broadcast_parameters", lambda *arguments: sent.append(arguments))
    named, communicator = weights(odd=False, dtype=torch.bfloat16), SimpleNamespace(world_size=2)
    require_same_start_(named, communicator, weights="broadcast")  # type: ignore[arg-type]
    assert sent == [(named, communicator)]
    require_same_start_(named, communicator, weights="unchecked")  # type: ignore[arg-type]
    assert len(sent) == 1


def test_closed_reducer_and_unknown_choices_are_refused() -> None:
    named = nn.Linear(1, 1).named_parameters()
    with pytest.raises(ValueError, match=naming("'some'", "error")):
        GradientReducer(named, connect(env=ALONE), unused="some")  # type: ignore[arg-type]
    reducer = GradientReducer(nn.Linear(1, 1).named_parameters(), connect(env=ALONE))
    reducer.close()
    for method in (reducer.zero_grad, reducer.wait):
        with pytest.raises(RuntimeError, match="is closed: make a new one"):
            method()


def test_same_start_refuses_an_unknown_choice() -> None:
    with pytest.raises(ValueError, match=naming("'seeded'", "broadcast")):
        GradientReducer(nn.Linear(1, 1).named_parameters(), connect(env=ALONE), weights="seeded")  # type: ignore[arg-type]


def of_reducer(model: nn.Module, communicator: Communicator, **options: Any) -> object:
    return GradientReducer(model.named_parameters(), communicator, **options)


def of_optimizer(model: nn.Module, communicator: Communicator, **options: Any) -> object:
    trained = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return DistributedOptimizer(trained, model.named_parameters(), communicator, **options)


@pytest.mark.parametrize("sums", [of_reducer, of_optimizer])
def test_same_start_is_also_of_frozen_weights(sums: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    model, agreed, compared = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), list[str](), list[str]()
    model[0].weight.requires_grad_(False)
    monkeypatch.setattr(Communicator, "agree", lambda self, what, text: agreed.append(text))
    for module in (reducer, distributed_optimizer):
        monkeypatch.setattr(module, "require_same_start_", lambda tensors, *_, **__: compared.extend(tensors))
    sums(model, alone(world_size=2))
    assert sorted(compared) == sorted(model.state_dict())
    is_reducer = sums is of_reducer
    assert ("0.weight (3, 2) torch.float32\n" in agreed[0], "\n3 trained\n" in agreed[0]) == (is_reducer, True)


def test_same_start_skips_weights_without_values() -> None:
    """As of a frozen layer that is loaded only when it is needed."""
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}
    require_same_start_(tensors, alone(), weights="equal")
