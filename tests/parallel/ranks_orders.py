"""Random programs of reducers, unused layers and sums of the script, against an oracle: part of ranks.py.

Each rank knows the images of all ranks, so each computes what the sums must be, without communication.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from ranks_sums import values
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.broadcast import all_reduce, broadcast_parameters
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.errors import CommError

NUM_LAYERS, WIDTH = 3, 4


@dataclass(frozen=True)
class Program:
    """What all ranks do alike, from a seed."""

    seed: int
    num_networks: int
    is_joint: bool
    """One reducer has all parameters; else one per network."""

    @property
    def has_one_reducer(self) -> bool:
        return self.is_joint or self.num_networks == 1

    def depths(self, step: int, rank: int) -> list[int]:
        """How many layers of each network a rank's images use in a step, from its own draws."""
        draw = random.Random(f"{self.seed} {step} {rank}")
        depths = [draw.choice((0, 1, NUM_LAYERS)) for _ in range(self.num_networks)]
        # with one reducer, a rank without gradients must not sum before wait()
        return depths if any(depths) or not self.has_one_reducer else [1] * self.num_networks


def draw_program(seed: int) -> Program:
    draw = random.Random(seed)
    return Program(seed, draw.randint(1, 3), draw.random() < 0.5)


def make_networks(program: Program) -> list[nn.Sequential]:
    """The same on all ranks; not by torch's generator, which ranks that are threads share."""
    layers = [[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)] for _ in range(program.num_networks)]
    networks = [nn.Sequential(*each).double() for each in layers]
    for k, parameter in enumerate(p for network in networks for p in network.parameters()):
        parameter.data = values(parameter.numel(), torch.float64, rank=100 * program.seed + k).view_as(parameter) / 2
    return networks


def losses(networks: list[nn.Sequential], program: Program, *, step: int, rank: int) -> Iterator[Tensor]:
    """One for each network that a rank's images use."""
    images_BC = values(3 * WIDTH, torch.float64, rank=1000 * program.seed + 10 * step + rank).view(3, WIDTH)
    for network, depth in zip(networks, program.depths(step, rank), strict=True):
        if depth:
            yield network[:depth](images_BC).tanh().square().sum()


def expected_gradients(networks: list[nn.Sequential], program: Program, *, step: int, num_ranks: int) -> list[Tensor]:
    """Gradients of the sum of all ranks' losses, computed here."""
    each = [loss for rank in range(num_ranks) for loss in losses(networks, program, step=step, rank=rank)]
    parameters = [parameter for network in networks for parameter in network.parameters()]
    found = torch.autograd.grad(each, parameters, allow_unused=True) if each else [None] * len(parameters)
    return [torch.zeros_like(p) if sum_ is None else sum_ for p, sum_ in zip(parameters, found, strict=True)]


OPERATIONS: tuple[Callable[[Communicator], object], ...] = (
    lambda communicator: None,
    lambda communicator: communicator.sum_(torch.ones(WIDTH * WIDTH, dtype=torch.float64), label="a metric"),
    lambda communicator: all_reduce(torch.ones(WIDTH), communicator, label="another metric"),
    lambda communicator: broadcast_parameters({"buffer": torch.ones(3)}, communicator),
    lambda communicator: communicator.gather("a text"),
)


def check_orders(communicator: Communicator, *, seeds: range) -> None:
    """Gradients are the sums of all ranks', whatever layers their images use and whatever the script sums meanwhile."""
    for seed in seeds:
        program = draw_program(seed)
        draw, networks = random.Random(seed), make_networks(program)
        named = [[(f"{k}.{name}", p) for name, p in each.named_parameters()] for k, each in enumerate(networks)]
        everything = [pair for each in named for pair in each]
        groups = [everything] if program.is_joint else named
        sizes = {"threshold_bytes": draw.choice((1, 200)), "buffer_bytes": draw.choice((40, 400))}
        reducers = [GradientReducer(group, communicator, **sizes) for group in groups]
        for step in range(5):
            expected = expected_gradients(networks, program, step=step, num_ranks=communicator.world_size)
            for loss in losses(networks, program, step=step, rank=communicator.rank):
                loss.backward()
            for reducer in reducers:
                draw.choice(OPERATIONS)(communicator)
                reducer.wait()
            draw.choice(OPERATIONS)(communicator)
            for (_, parameter), sum_ in zip(everything, expected, strict=True):
                torch.testing.assert_close(parameter.grad, sum_, rtol=1e-11, atol=1e-13)
                parameter.data.sub_(parameter.grad, alpha=0.1)
            for reducer in reducers:
                reducer.zero_grad()
        bits = [parameter.detach().view(-1).tolist() for _, parameter in everything]
        communicator.agree(f"the weights of program {seed}", repr(bits))
        _check_change(communicator, networks, reducers, draw)
        for reducer in reducers:
            reducer.close()


def _check_change(
    communicator: Communicator, networks: list[nn.Sequential], reducers: list[GradientReducer], draw: random.Random
) -> None:
    """A script that changes gradients before wait() is refused on all ranks."""
    for network in networks:
        network(torch.ones(1, WIDTH, dtype=torch.float64)).sum().backward()
    parameters = [parameter for network in networks for parameter in network.parameters()]
    draw.choice(
        (
            lambda: nn.utils.clip_grad_norm_(parameters, 0.1),
            lambda: [p.grad.mul_(0.5) for p in parameters if p.grad is not None],
            lambda: [setattr(p, "grad", torch.ones_like(p)) for p in parameters],
        )
    )()
    for reducer in reducers:
        with pytest.raises(CommError, match="between backward and wait"):
            reducer.wait()
        reducer.zero_grad()
