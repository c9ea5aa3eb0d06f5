"""The sharded update against the one that every rank makes in whole."""

import copy
import hashlib
import io
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.gradients.scatter_gather import ScatterGather
from bigbatch.errors import ConfigError, PeerLostError, ReplicasDiffer
from bigbatch.trainer.build.optimizer import make_native
from bigbatch.trainer.observe.replicas import compare
from bigbatch.trainer.optim import divided_work
from bigbatch.trainer.optim.divided_work import DividedWork
from bigbatch.trainer.optim.matrices import MatrixOptimizer
from bigbatch.trainer.optim.param_groups import load_optimizer_state, param_groups
from bigbatch.trainer.step.loss_scale import Scaling
from bigbatch.trainer.step.precision import Precision
from bigbatch.trainer.step.sharded import ShardedWeights, shard_update

ADAPTIVE = {"betas": (0.9, 0.99), "eps": 1e-6}
HEAVY = {"nesterov": True}
LARS = {**HEAVY, "trust_coefficient": 0.02, "eps": 0.0, "momentum_form": "lr_inside"}
OPTIMIZERS = {"lars": (LARS, 1.0), "lamb": (ADAPTIVE, 0.01), "sgd": (HEAVY, 2.0), "adamw": (ADAPTIVE, 0.01)}
"""Options and learning rate."""
SIGNS = {"lion": ({"betas": (0.9, 0.99)}, 0.002)}
"""The same of what takes signs: in fp32 alone, since a sign that rounding turns is as large as any other."""
ORTHOGONAL = {"vector_lr_factor": 2.0, "newton_schulz_steps": 5, "newton_schulz_precision": "fp32"}
ROOTS = {"block_size": 40, "root_every_steps": 2, "factor_decay": 0.9, "eps": 1e-3}
WHOLE = {"muon": ({**HEAVY, **ORTHOGONAL}, 0.05), "shampoo": ({**HEAVY, **ROOTS}, 1.0)}
"""The same of those that need whole matrices."""
ROUNDING = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 3e-3}
"""Relative to the change of the weights: gradients in half precision are rounded after another sum."""


@dataclass
class Run:
    model: nn.Module
    precision: Precision
    reducer: GradientReducer
    optimizer: torch.optim.Optimizer
    communicator: Communicator

    def steps(self, *steps: int, skip: bool = False, poison: float = 1.0, accumulation: int = 1) -> None:
        """Each from images of its own on each rank. poison: factor of the last rank's loss."""
        for step in steps:
            self.reducer.zero_grad()
            generator = torch.Generator().manual_seed(1000 * step + self.communicator.rank)
            for microbatch in range(accumulation):
                self.reducer.is_active = microbatch == accumulation - 1
                images = torch.randn(8, 3, 6, 6, generator=generator).to(self.precision.compute_dtype)
                loss = 0.02 * self.model(images).float().square().mean()  # or fp16 overflows at first
                if self.communicator.rank == self.communicator.world_size - 1:
                    loss = loss * poison
                self.precision.backward(loss)
            self.reducer.wait()
            self.precision.update_(self.optimizer, skip_1=torch.tensor([skip]))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, written and read. Collective."""
        state = {
            "model": self.precision.model_state(),
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
        }
        torch.save(state, file := io.BytesIO())
        file.seek(0)
        return dict(torch.load(file, weights_only=True))

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.precision.load_model_state(state["model"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.precision.load_state_dict(state["precision"])

    def masters(self) -> Tensor:
        """Collective."""
        whole = self.precision.weights.whole()
        return torch.cat([whole[name].cpu().flatten() for name, _ in self.model.named_parameters()])

    def weights(self) -> Tensor:
        return torch.cat([p.detach().float().flatten() for p in self.model.parameters()])


def start(
    name: str, precision_name: str, communicator: Communicator, *, sharded: bool, behind_forward: bool = False
) -> Run:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), nn.Flatten(), nn.Linear(112, 5), nn.Linear(5, 3)]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last).eval()
    scaling = Scaling(initial=65536.0, growth_steps=2000) if precision_name == "fp16" else None
    precision = Precision(model, name=precision_name, device=communicator.device, scaling=scaling)
    sizes = {"threshold_bytes": 400, "buffer_bytes": 300}
    reducer = GradientReducer(model.named_parameters(), communicator, learn_order=False, scatter=sharded, **sizes)
    options, lr = {**OPTIMIZERS, **SIGNS, **WHOLE}[name]

    def make(masters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        groups = param_groups(model, weight_decay=0.01, substitute=masters)
        momentum = None if name in ("lamb", "adamw", "lion") else 0.9
        of_config: Any = SimpleNamespace(name=name, options=options, momentum=momentum)
        return make_native(of_config, groups, lr=lr)

    if sharded:
        optimizer = shard_update(
            model, precision, reducer, communicator, make_optimizer=make, behind_forward=behind_forward
        )
        if isinstance(optimizer, MatrixOptimizer):
            optimizer.divide = DividedWork(communicator)
    else:
        optimizer = make(precision.masters)
    return Run(model, precision, reducer, optimizer, communicator)


def loss_scale(run: Run) -> float:
    """Collective."""
    return float(run.precision.figures()["loss_scale"] or 0)


def check_sharded_update(communicator: Communicator) -> None:
    """Check every promise of the sharded update."""
    check_halves_of_a_sum(communicator)
    # of four matrices on more than a few ranks most of a gather is padding
    with patch.object(divided_work, "MAX_PADDING", communicator.world_size):
        for name in (*OPTIMIZERS, *SIGNS, *WHOLE):
            # one by vectors and one by matrices in each precision, the others in one
            one = "fp32" if name in SIGNS else "bf16"
            for precision in ROUNDING if name in ("lars", "shampoo") else (one,):
                check_same_update(name, precision, communicator)
                check_checkpoints(name, precision, communicator)
                check_skips(name, precision, communicator)
    check_norms(communicator)
    check_underflow(communicator)
    check_finite(communicator)
    check_replicas(communicator)
    check_too_small(communicator)
    check_memory(communicator)


def check_halves_of_a_sum(communicator: Communicator) -> None:
    """Reduce-scatter and all-gather, by hand."""
    n, rank, halves = communicator.world_size, communicator.rank, ScatterGather(communicator)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for size in (0, 1, 5):
            buffer_N = communicator.allocate(n * size, dtype)
            buffer_N.copy_(torch.arange(n * size) + rank)
            halves.start_reduce_scatter(buffer_N, label="scatter").wait()
            own = [n * i + n * (n - 1) / 2 for i in range(rank * size, (rank + 1) * size)]
            assert buffer_N.view(n, -1)[rank].tolist() == own
            halves.all_gather_(buffer_N, label="gather")
            assert buffer_N.tolist() == [n * i + n * (n - 1) / 2 for i in range(n * size)]
    plain_N = torch.arange(float(n))  # not from allocate()
    assert halves.all_gather_(plain_N * (plain_N == rank), label="plain").tolist() == plain_N.tolist()


def check_same_update(name: str, precision: str, communicator: Communicator) -> None:
    """The update equals the unsharded one up to rounding, with identical bits on all ranks."""
    whole, sharded = (start(name, precision, communicator, sharded=each) for each in (False, True))
    before = whole.masters()
    assert torch.equal(sharded.masters(), before)
    for run in (whole, sharded):
        run.steps(*range(6))
    way = (whole.masters() - before).norm()
    assert way > 0.01
    distance = float((sharded.masters() - whole.masters()).norm() / way)
    assert distance < ROUNDING[precision], f"{name} in {precision}: {distance}"
    assert_same_on_all(sharded)


def assert_same_on_all(run: Run) -> None:
    digests = run.communicator.gather(hashlib.sha256(run.weights().numpy().tobytes()).hexdigest())
    assert len(set(digests)) == 1
    scales = run.communicator.gather(str(loss_scale(run)))
    assert len(set(scales)) == 1, scales


def check_checkpoints(name: str, precision: str, communicator: Communicator) -> None:
    """A sharded run's checkpoint is that of a whole one, and either continues from the other's."""
    whole, sharded = (start(name, precision, communicator, sharded=each) for each in (False, True))
    for run in (whole, sharded):
        run.steps(0, 1)
    states = whole.state(), sharded.state()
    assert shapes(states[0]) == shapes(states[1])
    again, unsharded, resharded = (start(name, precision, communicator, sharded=each) for each in (True, False, True))
    again.load(states[1])
    unsharded.load(states[1])
    resharded.load(states[0])
    before = whole.masters()
    for run in (whole, sharded, again, unsharded, resharded):
        run.steps(2, 3)
    assert torch.equal(again.masters(), sharded.masters())
    assert same(again.state(), sharded.state())
    way = (whole.masters() - before).norm()
    for one, other in ((unsharded, sharded), (resharded, whole)):
        distance = float((one.masters() - other.masters()).norm() / way)
        assert distance < ROUNDING[precision], f"{name} in {precision}: {distance}"


def shapes(value: Any) -> Any:
    """Everything but the numbers in tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return {key: shapes(each) for key, each in value.items()} if isinstance(value, dict) else value


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    return bool(ours == theirs)


def check_skips(name: str, precision: str, communicator: Communicator) -> None:
    """A skipped update leaves no trace; an overflow on one rank counts on all, whichever rank holds that share."""
    sharded, twin = (start(name, precision, communicator, sharded=True) for _ in range(2))
    sharded.steps(0)
    sharded.steps(7, skip=True)
    sharded.steps(1)
    twin.steps(0, 1)
    assert same(sharded.state(), twin.state())
    if precision == "fp16":
        scale = loss_scale(twin)
        sharded.steps(8, poison=float("inf"))
        assert loss_scale(sharded) == scale / 2
        assert same(sharded.state()["model"], twin.state()["model"])
        check_overflow_in_one_share(name, communicator)
        assert_same_on_all(sharded)


def check_overflow_in_one_share(name: str, communicator: Communicator) -> None:
    """One element of the sum is inf, which one rank alone sees."""
    run = start(name, "fp16", communicator, sharded=True)
    before, scale = run.weights(), loss_scale(run)
    run.reducer.is_active = False  # gradients are changed between backward and their sum
    for poisoned in ("0.weight", "1.bias", "5.bias"):
        run.reducer.zero_grad()
        run.precision.backward(0 * sum(p.float().sum() for p in run.model.parameters()))
        run.model.get_parameter(poisoned).grad[..., -1] = float("nan")
        run.reducer.wait()
        run.precision.update_(run.optimizer, skip_1=torch.tensor([False]))
        scale /= 2
        assert loss_scale(run) == scale
        assert torch.equal(run.weights(), before)


def check_norms(communicator: Communicator) -> None:
    """Norms are those of whole tensors, however the pieces are distributed."""
    run = start("lars", "bf16", communicator, sharded=True)
    masters = [run.precision.masters[name] for name, _ in run.model.named_parameters()]
    expected = [
        float(w.detach().double().norm()) for w in start("lars", "fp32", communicator, sharded=False).model.parameters()
    ]
    torch.testing.assert_close(run.precision.weights.norms(masters), torch.tensor(expected), rtol=1e-6, atol=0)


def check_underflow(communicator: Communicator) -> None:
    """Underflow is that of the sums: those of one tensor cancel out, and no rank's own gradients are small."""
    for name in ("bf16", "fp16"):
        run = start("sgd", name, communicator, sharded=True)
        run.reducer.is_active = False  # gradients are changed between backward and their sum
        run.reducer.zero_grad()
        run.precision.backward(0 * sum(p.float().sum() for p in run.model.parameters()))
        for parameter in run.model.parameters():
            parameter.grad.fill_(1.0)
        others = communicator.world_size - 1
        run.model.get_parameter("4.weight").grad.fill_(-others if communicator.rank == others else 1.0)
        run.reducer.wait()
        half = [p.numel() for p in run.model.parameters() if p.dtype != torch.float32]
        assert run.precision.figures()["underflow_fraction"] == 112 * 5 / sum(half)


def check_finite(communicator: Communicator) -> None:
    """The masters count, as in a whole update: a number too large for fp16 is finite; one rank's part is enough."""
    run = start("sgd", "fp16", communicator, sharded=True)
    master = next(iter(run.precision.masters.values())).detach()
    master.fill_(1e6)
    run.precision.write_half_()
    assert run.precision.all_finite([run.precision.masters])
    if communicator.rank == 0:
        master[0] = float("nan")
    assert not run.precision.all_finite([run.precision.masters])
    state = [{"kept": torch.ones(3), "step": torch.tensor(1.0), "rate": 0.1}, {}]
    assert run.precision.all_finite(state)
    if communicator.rank == 0:
        state[0]["kept"][1] = float("inf")
    assert not run.precision.all_finite(state)


def check_replicas(communicator: Communicator) -> None:
    """Factors of whole matrices are on every rank, and compared; what a rank has of the rest has no copy."""
    run = start("shampoo", "bf16", communicator, sharded=True)
    run.steps(0)
    parts: Any = SimpleNamespace(
        **vars(run), average_state=lambda done: {}, statistics=SimpleNamespace(running_N=torch.zeros(1))
    )
    compare(parts, communicator, done=1)
    if communicator.rank == communicator.world_size - 1:
        run.optimizer.state[run.precision.masters["0.weight"]]["factors"][0] += 1
    with pytest.raises(ReplicasDiffer, match=r"the same bits of factors of 0\.weight"):
        compare(parts, communicator, done=1)


def check_too_small(communicator: Communicator) -> None:
    """The last rank alone has nothing, and all say so."""
    model = nn.Linear(communicator.world_size - 1, 1, bias=False)
    reducer = GradientReducer(model.named_parameters(), communicator, learn_order=False, scatter=True)
    said = ""
    try:
        ShardedWeights(model, dict(model.named_parameters()), reducer, communicator)
    except ConfigError as error:
        said = str(error)
    assert "optimizer.sharded=True" in said


def check_memory(communicator: Communicator) -> None:
    """Masters and state are of a share: at most one more element a buffer than its part."""
    run = start("lamb", "bf16", communicator, sharded=True)
    run.steps(0)
    total, num_buffers = sum(p.numel() for p in run.model.parameters()), len(run.reducer.plan.buffers)
    most = total / communicator.world_size + num_buffers
    assert sum(master.numel() for master in run.precision.masters.values()) <= most
    for key in ("exp_avg", "exp_avg_sq"):
        assert sum(state[key].numel() for state in run.optimizer.state.values()) <= most


@contextmanager
def late_gathers(communicator: Communicator, *, of_rank: int) -> Iterator[None]:
    """Let gathers of buffers take long, and begin later still on one rank."""
    gather_ = ScatterGather._all_gather_

    def late_(self: ScatterGather, buffer_N: Tensor) -> None:
        time.sleep(0.004 if communicator.rank == of_rank else 0.002)
        gather_(self, buffer_N)

    with patch.object(ScatterGather, "_all_gather_", late_):
        yield


def check_behind_forward(communicator: Communicator) -> None:
    """Weights that travel behind the next forward give the bits of those that the step waits for."""
    labels: list[str] = []
    start_gather = ScatterGather.start_all_gather

    def noted(self: ScatterGather, buffer_N: Tensor, *, label: str) -> Any:
        labels.append(label)
        return start_gather(self, buffer_N, label=label)

    with (
        late_gathers(communicator, of_rank=communicator.world_size - 1),
        patch.object(ScatterGather, "start_all_gather", noted),
    ):
        for precision in ("fp32", "fp16"):
            for accumulation in (1, 2):
                ways = [start("lars", precision, communicator, sharded=True, behind_forward=b) for b in (False, True)]
                labels.clear()
                for run in ways:
                    run.steps(*range(3), accumulation=accumulation)
                num_buffers = len(ways[0].reducer.plan.buffers)
                assert num_buffers > 1
                assert len(labels) == 2 * 3 * num_buffers
                assert len(set(communicator.gather(str(labels)))) == 1, "all ranks start the same gathers"
                ways[1].precision.wait_for_weights()
                assert torch.equal(ways[0].weights(), ways[1].weights())
                assert same(ways[0].state(), ways[1].state())


def lose_in_a_gather(backend: str, timeout_seconds: str) -> int:
    """Rank 1 dies as it gathers the weights of the second update; the next forward of the others says so."""
    communicator = connect(backend=backend, timeout_seconds=float(timeout_seconds))
    run = start("sgd", "fp32", communicator, sharded=True, behind_forward=True)
    run.steps(0)
    if communicator.rank == 1:
        run.precision.wait_for_weights()
        scatter_gather_ = run.precision.weights.layout.scatter_gather  # type: ignore[attr-defined]
        scatter_gather_._all_gather_ = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        run.steps(1)
        started = time.monotonic()
        run.model(torch.ones(1, 3, 6, 6))
    except PeerLostError as error:
        print(f"noticed after {time.monotonic() - started:.1f} s: {error}", flush=True)
        return 7
    return 0
