"""Memory and time of the sharded update beside the whole one: ranks on this machine, ResNet-50's weights.

    python -m benchmarks.sharded_update --ranks 2 --out benchmarks/results/sharded-update.json

A turn sums random gradients over the ranks and updates, once whole (all-reduce, each rank updates everything), once
sharded (reduce-scatter, a share, all-gather), and once so that the weights are gathered behind the next forward; who
goes first changes. With --pictures each ends with a forward; nothing else hides the communication, as there is no
backward pass. Seconds are those of the slowest rank, a ratio is that of neighbours in one turn.
Bytes are what a rank keeps for the optimizer beside the model and its gradients: fp32 masters, their gradients, state.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.record import conditions, show, spread, write_record
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.trainer.build.optimizer import make_native
from bigbatch.trainer.config.sections import OPTIMIZERS
from bigbatch.trainer.models import build_model
from bigbatch.trainer.optim.param_groups import param_groups
from bigbatch.trainer.step.precision import COMPUTE_DTYPES, Precision
from bigbatch.trainer.step.sharded import shard_update

KINDS = ("whole", "sharded", "behind forward")
RATIOS = (("sharded", "whole"), ("behind forward", "sharded"))
SETTINGS: dict[str, Any] = {
    "momentum": 0.9,
    "nesterov": False,
    "trust_coefficient": 0.001,
    "eps": 1e-6,
    "momentum_form": "lr_inside",
    "betas": (0.9, 0.999),
    "options": None,
}
LR = 1e-6
"""So small that random gradients leave the weights unchanged."""


def main() -> None:
    """Start the ranks; in a rank, run it."""
    options = parse()
    if not options.is_rank:
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={options.ranks}"]
        rank = ["-m", "benchmarks.sharded_update", *sys.argv[1:], "--is-rank"]
        sys.exit(subprocess.run([*launcher, *rank], check=False).returncode)
    del options.is_rank
    facts = conditions(options)
    torch.set_num_threads(options.threads)
    communicator = connect(backend=options.backend)
    updates = {kind: Update(options, communicator, kind=kind) for kind in KINDS}
    seconds = measure(updates, repetitions=options.repetitions)
    results = summarise(seconds, updates, communicator)
    if communicator.rank == 0:
        tell(results)
        if options.out:
            write_record(options.out, {"benchmark": "sharded_update", "conditions": facts, "results": results})
    communicator.close()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="(default: %(default)s)")
    add("--model", default="resnet50", help="(default: %(default)s)")
    add("--optimizer", choices=OPTIMIZERS, default="lars", help="(default: %(default)s)")
    add("--precision", choices=tuple(COMPUTE_DTYPES), default="bf16", help="(default: %(default)s)")
    add("--backend", default="auto", help="as comm.backend (default: %(default)s)")
    add("--repetitions", type=int, default=10, help="(default: %(default)s)")
    add("--pictures", type=int, default=0, help="images of a rank, 224 x 224, in a forward (default: none)")
    add("--threads", type=int, default=1, help="threads of the CPU, per rank (default: %(default)s)")
    add("--out", type=Path, help="JSON file for the results")
    add("--is-rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


class Update:
    """A model with gradients, and all parts that update it."""

    def __init__(self, options: argparse.Namespace, communicator: Communicator, *, kind: str) -> None:
        is_sharded = kind != "whole"
        torch.manual_seed(0)
        model = build_model(options.model, num_classes=1000, norm=nn.BatchNorm2d)
        self.model = model.to(communicator.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.precision = Precision(self.model, name=options.precision, device=communicator.device)
        self.reducer = GradientReducer(
            self.model.named_parameters(), communicator, learn_order=False, scatter=is_sharded
        )

        def make(masters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
            groups = param_groups(self.model, weight_decay=5e-5, substitute=masters)
            settings = SimpleNamespace(name=options.optimizer, **SETTINGS)
            return make_native(settings, groups, lr=LR)  # type: ignore[arg-type]

        if is_sharded:
            self.optimizer = shard_update(
                self.model,
                self.precision,
                self.reducer,
                communicator,
                make_optimizer=make,
                behind_forward=kind == "behind forward",
            )
        else:
            self.optimizer = make(self.precision.masters)
        self.precision.backward(0 * sum(p.float().sum() for p in self.model.parameters()))
        self.reducer.wait()
        images_BCHW = torch.ones(options.pictures, 3, 224, 224, device=communicator.device)
        self.images_BCHW = images_BCHW.to(self.precision.compute_dtype, memory_format=torch.channels_last)

    @torch.no_grad()
    def turn(self) -> tuple[float, float]:
        """Return the seconds of the sums, and of the update with its gather, and the forward."""
        for buffer_N in self.reducer.buffers:
            buffer_N.normal_()
        marks = [self._now()]
        self.reducer.wait()
        marks.append(self._now())
        self.precision.update_(self.optimizer)
        if len(self.images_BCHW):
            with self.precision.forward():
                self.model(self.images_BCHW)
        self.precision.settle()
        marks.append(self._now())
        return marks[1] - marks[0], marks[2] - marks[1]

    def _now(self) -> float:
        if self.reducer.buffers[0].is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def kept_bytes(self) -> dict[str, int]:
        """Count the bytes that the optimizer keeps beside the model and its gradients."""
        masters = list(self.precision.masters.values())
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        beside = [*self.model.parameters(), *self.reducer.buffers]
        return {
            "masters": bytes_beside(masters, beside),
            "master_gradients": bytes_beside([m.grad for m in masters if m.grad is not None], beside),
            "state": bytes_beside([value for value in state if isinstance(value, Tensor)], beside),
        }


def bytes_beside(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> int:
    """Count the bytes of the tensors that do not lie in the memory of others."""
    known = {other.untyped_storage().data_ptr() for other in others}
    return sum(t.nbytes for t in tensors if t.untyped_storage().data_ptr() not in known)


def measure(updates: dict[str, Update], *, repetitions: int) -> dict[str, list[tuple[float, float]]]:
    """Measure turn by turn; the first two are discarded."""
    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for turn in range(repetitions + 2):
        first = turn % len(KINDS)
        for kind in KINDS[first:] + KINDS[:first]:
            took = updates[kind].turn()
            if turn >= 2:
                seconds[kind].append(took)
    return seconds


def summarise(
    seconds: dict[str, list[tuple[float, float]]], updates: dict[str, Update], communicator: Communicator
) -> dict[str, Any]:
    """Return the slowest rank's times, and the most kept bytes of any rank. Collective."""
    mine = {kind: {"seconds": seconds[kind], "bytes": updates[kind].kept_bytes()} for kind in KINDS}
    ranks = [json.loads(text) for text in communicator.gather_text(json.dumps(mine))]
    results: dict[str, Any] = {"weights": sum(p.numel() for p in updates["whole"].model.parameters())}
    totals: dict[str, list[float]] = {}
    for kind in KINDS:
        turns = list(zip(*(rank[kind]["seconds"] for rank in ranks), strict=True))
        totals[kind] = [max(sum(one) for one in turn) for turn in turns]
        results[kind] = {
            "sum_seconds": spread([max(one[0] for one in turn) for turn in turns]),
            "update_seconds": spread([max(one[1] for one in turn) for turn in turns]),
            "seconds": spread(totals[kind]),
            "bytes": {key: max(rank[kind]["bytes"][key] for rank in ranks) for key in mine[kind]["bytes"]},
        }
    results["ratios"] = {
        f"{ours} / {other}": spread([a / b for a, b in zip(totals[ours], totals[other], strict=True)])
        for ours, other in RATIOS
    }
    return results


def tell(results: dict[str, Any]) -> None:
    """Print a table."""
    for kind in KINDS:
        for key in ("sum_seconds", "update_seconds", "seconds"):
            print(show(f"{kind}: {key}", results[kind][key], unit="s"))
        kept = ", ".join(f"{key} {value / 1e6:.1f} MB" for key, value in results[kind]["bytes"].items())
        print(f"{kind}: {kept} a rank")
    for name, ratio in results["ratios"].items():
        print(show(name, ratio, unit=""))


if __name__ == "__main__":
    main()
