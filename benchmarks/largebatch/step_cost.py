"""CPU time of the update that ends a training step, by each optimizer in turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.largebatch.ablation_cases import TUNING_SEED, Form, write_experiment
from benchmarks.largebatch.beyond_cases import case
from bigbatch.comm.connection import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.build.model import make_model
from bigbatch.trainer.build.optimizer import make_optimizer
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config

ROUNDS = 15
UPDATES = 20
"""A turn: a whole number of every optimizer's cycles, for Shampoo computes roots only now and then."""


def update_milliseconds(form: Form, names: Sequence[str], folder: Path) -> dict[str, float]:
    """Return the median over turns of what an update takes each, on one thread."""
    directory = folder / "update-cost"
    updates = {}
    for name in names:
        plain = case(form, name, form.batches[0])
        path = write_experiment(
            form, plain, data=folder / "data", directory=directory / name, seed=TUNING_SEED, base_lr=1e-3
        )
        updates[name] = _make_update(load_config(["--config", str(path)]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _in_turns(updates)
    finally:
        torch.set_num_threads(threads)


def _make_update(config: Config) -> Callable[[], object]:
    with connect(env=ALONE) as communicator:
        model = make_model(config, communicator)
    optimizer = make_optimizer(config.optimizer, model, dict(model.named_parameters()), lr=config.schedule.base_lr)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.grad = torch.empty_like(weight).copy_(1e-3 * torch.randn(weight.shape, generator=generator))
    return optimizer.step


def _in_turns(updates: dict[str, Callable[[], object]]) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in updates}
    for number in range(1 + ROUNDS):
        for name, update in updates.items():
            start = time.process_time()
            for _ in range(UPDATES):
                update()
            if number:  # the first turn makes state, too
                found[name].append(1000 * (time.process_time() - start) / UPDATES)
    return {name: statistics.median(values) for name, values in found.items()}
