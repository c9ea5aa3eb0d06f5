"""Seconds of one LARS step over a torchvision model's parameters, beside a per-tensor loop and SGD.

python benchmarks/lars_step.py --device cuda --repeats 50

All contenders take turns within one run, each on its own copy of the weights, so their ratios are the
result. GB/s is effective: the bytes that no step can avoid (read weight, gradient and momentum, write
weight and momentum) over the time. Prints a table and one JSON line.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn

from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.optim.param_groups import param_groups

FP32_TRAFFIC = 5 * 4
"""Bytes per parameter: three reads and two writes."""


class LoopLARS(torch.optim.Optimizer):
    """The usual way to write LARS: a Python loop with some ten kernels for each tensor."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                update = w.grad + group["weight_decay"] * w
                if group["adapt"]:
                    w_norm, g_norm = w.norm(), w.grad.norm()
                    ratio = 0.001 * w_norm / (g_norm + group["weight_decay"] * w_norm)
                    update *= torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)
                if w not in self.state:
                    self.state[w]["momentum_buffer"] = torch.zeros_like(w)
                buffer = self.state[w]["momentum_buffer"]
                buffer.mul_(group["momentum"]).add_(update, alpha=group["lr"])
                w.sub_(buffer)


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lars": lambda groups: LARS(groups, lr=0.1),
    "lars_loop": lambda groups: LoopLARS(groups, {"lr": 0.1, "momentum": 0.9}),
    "sgd_foreach": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True),
}


def make_step(name: str, *, model: str, device: str) -> Callable[[], object]:
    """The step of a fresh optimizer over a fresh model with random gradients."""
    torch.manual_seed(0)
    net: nn.Module = getattr(torchvision.models, model)().to(device)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    return MAKERS[name](param_groups(net, weight_decay=5e-5)).step


def seconds_of(step: Callable[[], object], *, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(steps: dict[str, Callable[[], object]], *, repeats: int, device: str) -> dict[str, list[float]]:
    """Interleaved, so that a slow spell of the machine hits all alike; two rounds are thrown away."""
    rounds = [{name: seconds_of(step, device=device) for name, step in steps.items()} for _ in range(repeats + 2)]
    return {name: [each[name] for each in rounds[2:]] for name in steps}


def summarise(seconds: list[float], *, reference: list[float], num_parameters: int) -> dict[str, float]:
    median = statistics.median(seconds)
    return {
        "n": len(seconds),
        "median_ms": 1e3 * median,
        "min_ms": 1e3 * min(seconds),
        "max_ms": 1e3 * max(seconds),
        "ratio_to_lars": median / statistics.median(reference),
        "gb_per_s": FP32_TRAFFIC * num_parameters / median / 1e9,
    }


def conditions(*, model: str, device: str) -> dict[str, Any]:
    with torch.device("meta"):
        net: nn.Module = getattr(torchvision.models, model)()
    return {
        "model": model,
        "parameters": sum(p.numel() for p in net.parameters()),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default="resnet50", help="a torchvision classifier")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    steps = {name: make_step(name, model=args.model, device=args.device) for name in MAKERS}
    seconds = measure(steps, repeats=args.repeats, device=args.device)
    facts = conditions(model=args.model, device=args.device)
    rows = {
        name: summarise(each, reference=seconds["lars"], num_parameters=facts["parameters"])
        for name, each in seconds.items()
    }
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"{'':12}" + "".join(f"{key:>15}" for key in rows["lars"]))
    for name, row in rows.items():
        print(f"{name:12}" + "".join(f"{value:15.4g}" for value in row.values()))
    print(json.dumps(facts | {"results": rows}))


if __name__ == "__main__":
    main()
