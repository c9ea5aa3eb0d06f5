"""Seconds of one LARS step over all weights of a model, beside other implementations and SGD, in one run.

    python -m benchmarks.largebatch.lars_step --device cpu --out benchmarks/results/lars-step-cpu.json

All contestants take turns, each on its own copy of the weights, so their ratios are the result. No LARS step can avoid
28 bytes per parameter: the norms read weight and gradient, the update reads weight, gradient and momentum and writes
weight and momentum. That over the time, as a share of what the same machine copies or adds in the same rounds
(buffers far larger than any cache), says how much is left to gain; the cache can lift it above 1.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.record import conditions, ratios, show, spread, version_of, write_record
from bigbatch.trainer.models import build_model
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.optim.param_groups import param_groups

LARS_BYTES = 7 * 4
"""Bytes per fp32 parameter: five reads and two writes."""
BANDWIDTH_BYTES = {"copy": 2 * 4, "triad": 3 * 4}
"""Bytes per element: one or two reads and a write."""

Action = Callable[[], object]
Groups = list[dict[str, Any]]
"""Like param_groups: decaying and adapting, then neither."""

LR, MOMENTUM, TRUST = 0.1, 0.9, 0.001


class LoopLARS(torch.optim.Optimizer):
    """LARS in the usual way: a Python loop with some ten kernels for each tensor."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter, in place, with the learning rate in the momentum (lr_inside)."""
        for group in self.param_groups:
            for w in group["params"]:
                update = w.grad + group["weight_decay"] * w
                if group["adapt"]:
                    w_norm, g_norm = w.norm(), w.grad.norm()
                    ratio = TRUST * w_norm / (g_norm + group["weight_decay"] * w_norm)
                    update *= torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)
                if w not in self.state:
                    self.state[w]["momentum_buffer"] = torch.zeros_like(w)
                buffer = self.state[w]["momentum_buffer"]
                buffer.mul_(group["momentum"]).add_(update, alpha=group["lr"])
                w.sub_(buffer)


def timm_lars(groups: Groups, **settings: Any) -> torch.optim.Optimizer:
    """Make timm's Lars; foreach defaults to timm's own choice."""
    from timm.optim.lars import Lars

    return Lars(groups, lr=LR, momentum=MOMENTUM, trust_coeff=TRUST, **settings)


def torch_optimizer_lars(groups: Groups, **settings: Any) -> torch.optim.Optimizer:
    """Make LARS of the package torch-optimizer, which took it from lightning-bolts."""
    from torch_optimizer import LARS as Peer

    return Peer(groups, lr=LR, momentum=MOMENTUM, trust_coefficient=TRUST, **settings)


def apex_larc(groups: Groups) -> torch.optim.Optimizer:
    """Make apex's LARC, as before its removal in May 2025; it adapts bias and batch norm, too."""
    from apex.optimizers import FusedSGD
    from apex.parallel.LARC import LARC

    return LARC(FusedSGD(groups, lr=LR, momentum=MOMENTUM), trust_coefficient=TRUST, clip=False)


def sgd(groups: Groups, **settings: Any) -> torch.optim.Optimizer:
    """Make SGD, without norms and ratios: the floor."""
    return torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM, **settings)


MAKERS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "bigbatch": lambda groups: LARS(groups, lr=LR),
    "timm": timm_lars,
    "timm_foreach": lambda groups: timm_lars(groups, foreach=True),
    "torch_optimizer": torch_optimizer_lars,
    "loop": lambda groups: LoopLARS(groups, {"lr": LR, "momentum": MOMENTUM}),
    "apex_larc": apex_larc,
    "sgd_fused": lambda groups: sgd(groups, fused=True),
    "sgd_foreach": lambda groups: sgd(groups, foreach=True),
}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    facts = conditions(options) | {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "cpu_threads": torch.get_num_threads(),
        **{name: version_of(name) for name in ("timm", "torch-optimizer", "apex")},
    }
    results = {name: measure_model(name, options) for name in options.models}
    write_record(options.out, {"benchmark": "lars-step", "conditions": facts, "models": results})


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", default=["resnet50", "alexnet_bn"], help="names that model.name takes")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: all)")
    parser.add_argument("--bandwidth-mb", type=int, default=512, help="size of the buffers that are copied and added")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def measure_model(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure every contestant over that model's weights, and the machine's bandwidth, in the same rounds."""
    actions, left_out = make_steps(model, device=options.device)
    if options.device == "cuda":
        actions["bigbatch_graph"] = captured(make_steps(model, device="cuda")[0]["bigbatch"])
    num_bandwidth = options.bandwidth_mb * 10**6 // 4
    actions |= bandwidth_actions(num_bandwidth, device=options.device)
    seconds = measure(actions, repeats=options.repeats, device=options.device)
    found = summarise(seconds, num_parameters=num_parameters(model), num_bandwidth=num_bandwidth)
    for name, values in found["milliseconds"].items():
        print(show(f"{model} {name}", values, unit="ms"), file=sys.stderr)
    for name, reason in left_out.items():
        print(f"{model} {name}: {reason}", file=sys.stderr)
    return found | {"left_out": left_out}


def make_net(model: str) -> nn.Module:
    """Make the classifier of 1,000 classes; ghost batch norm has the parameters of plain batch norm."""
    return build_model(model, num_classes=1000, norm=nn.BatchNorm2d)


def num_parameters(model: str) -> int:
    """Count the parameters without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in make_net(model).parameters())


def make_steps(model: str, *, device: str) -> tuple[dict[str, Action], dict[str, str]]:
    """Make the step of each contestant over fresh weights with random gradients; and why others cannot take part."""
    steps: dict[str, Action] = {}
    left_out: dict[str, str] = {}
    for name, maker in MAKERS.items():
        torch.manual_seed(0)
        net = make_net(model).to(device)
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        try:
            steps[name] = maker(param_groups(net, weight_decay=5e-5)).step
        except ImportError as error:
            left_out[name] = f"not installed: {error}"
    return steps, left_out


def captured(step: Action) -> Action:
    """Capture the step as a CUDA graph, which removes the host's share of the time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # the first step also allocates the momentum
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def bandwidth_actions(num_elements: int, *, device: str) -> dict[str, Action]:
    """Make the copy b = a and the triad c = a + 0.5 b (McCalpin's STREAM)."""
    a, b, c = (torch.zeros(num_elements, device=device) for _ in range(3))
    return {"copy": lambda: b.copy_(a), "triad": lambda: torch.add(a, b, alpha=0.5, out=c)}


def seconds_of(action: Action, *, device: str) -> float:
    """Time an action; on a GPU between two events of its stream, launches included if the host is slower."""
    if device == "cpu":
        start = time.perf_counter()
        action()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    action()
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end)


def measure(actions: dict[str, Action], *, repeats: int, device: str) -> dict[str, list[float]]:
    """Measure in turn, so that a slow spell of the machine affects all alike; two rounds are discarded."""
    rounds = [{name: seconds_of(each, device=device) for name, each in actions.items()} for _ in range(repeats + 2)]
    return {name: [each[name] for each in rounds[2:]] for name in actions}


def summarise(seconds: dict[str, list[float]], *, num_parameters: int, num_bandwidth: int) -> dict[str, Any]:
    """Sum up in spreads, ratios of each round to our step of that round, and shares of the best bandwidth seen."""
    steps = {name: values for name, values in seconds.items() if name not in BANDWIDTH_BYTES}
    gb_per_s = {
        name: spread([each * num_bandwidth / s / 1e9 for s in seconds[name]]) for name, each in BANDWIDTH_BYTES.items()
    }
    best = max(each["median"] for each in gb_per_s.values())
    return {
        "parameters": num_parameters,
        "milliseconds": {name: spread([1e3 * s for s in values]) for name, values in steps.items()},
        "times_bigbatch": {name: spread(ratios(values, steps["bigbatch"])) for name, values in steps.items()},
        "bandwidth_gb_per_s": gb_per_s,
        "share_of_bandwidth": {
            name: spread([LARS_BYTES * num_parameters / s / 1e9 / best for s in values])
            for name, values in steps.items()
            if not name.startswith("sgd")
        },
    }


if __name__ == "__main__":
    main()
