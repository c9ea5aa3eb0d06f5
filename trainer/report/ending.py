"""The last lines of a run, for a person: what it reached, how long it took, what limited it, what comes next."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bigbatch.trainer.report.progress import MAX_WITHOUT_TOP5, metric_text, noise_scale_text
from bigbatch.words import count, is_number

MAX_SHOWN = 3
"""Most metrics of the user, and most bad images, in their line; summary.json has all."""
ACCURACIES = {"top1": "top-1", "top5": "top-5", "best_top1": "best top-1"}
GRADIENTS, SLOW_RANKS = "waiting for gradients", "waiting for slow ranks"
WAITS = {
    "waiting for images": "input_wait_fraction",
    GRADIENTS: "exposed_communication_fraction",
    SLOW_RANKS: "straggler_fraction",
}


def closing_lines(summary: Mapping[str, Any], folder: Path, *, num_classes: int) -> list[str]:
    """Return at most 12 lines about a finished run in this folder.

    summary: contents of summary.json, perhaps edited: a figure that is no number is left out.
    """
    lines = {
        "result": _result(summary, num_classes),
        "worst": _worst(summary),
        "training": _training(summary),
        "speed": _speed(summary),
        "step": _step(summary),
        "input": _input(summary),
        "ranks": _ranks(summary),
        "cost": ", ".join(_numbers(summary, gpu_hours="{:,.2f} GPU-hours", energy_joules="{:,.0f} J")),
        "noise": noise_scale_text(summary, unit=" images") if "noise_scale" in summary else "",
        "skipped": _skipped(summary),
        "files": f"{folder}: plot.png, summary.json, metrics.jsonl, checkpoints",
        "next": " or ".join(f"bigbatch {verb} {_word(folder)}" for verb in ("evaluate", "report")),
    }
    return [f"{name:10}{text}" for name, text in lines.items() if text]


def _word(folder: Path) -> str:
    """Return the folder as a word of a command line, which does not begin like an option."""
    return shlex.quote(f"./{folder}" if str(folder).startswith("-") else str(folder))


def _numbers(summary: Mapping[str, Any], **forms: str) -> Iterator[str]:
    """Yield each figure of the summary that is a number, in its form."""
    for name, form in forms.items():
        if is_number(value := summary.get(name)):
            yield form.format(value)


def _result(summary: Mapping[str, Any], num_classes: int) -> str:
    forms = {name: f"{label} {{:.2%}}" for name, label in ACCURACIES.items()}
    if summary.get("best_top1") == summary.get("top1"):
        del forms["best_top1"]
    if num_classes <= MAX_WITHOUT_TOP5:
        del forms["top5"]
    shown = [*_numbers(summary, **forms)]
    metrics = summary.get("metrics")
    own = list(metrics.items()) if isinstance(metrics, dict) else []
    shown += [f"{name} {metric_text(value)}" for name, value in own[:MAX_SHOWN]]
    return ", ".join(shown) + _more(own)


def _worst(summary: Mapping[str, Any]) -> str:
    """Return the classes with the least share of right answers."""
    worst = summary.get("worst_classes")
    found = [each for each in worst if isinstance(each, dict)] if isinstance(worst, list) else []
    shown = [f"{each.get('class')} {each['recall']:.1%}" for each in found if is_number(each.get("recall"))]
    return f"{', '.join(shown)} right" if shown else ""


def _training(summary: Mapping[str, Any]) -> str:
    done = [count(summary[f"{name}s"], name) for name in ("epoch", "step") if is_number(summary.get(f"{name}s"))]
    rule = summary.get("ended_by")
    shown = [
        *done,
        *_numbers(summary, global_batch_size="{:,} images in a step"),
        *([f"ended by {rule}"] if rule not in (None, "run.epochs") else []),
    ]
    if resumed := summary.get("resumed_after_step"):
        shown.append(f"resumed after step {resumed}")
    return ", ".join(shown)


def _speed(summary: Mapping[str, Any]) -> str:
    is_resumed = bool(summary.get("resumed_after_step"))
    seconds = "{:,.1f} s" + " since the resume" * is_resumed
    total = {"total_seconds": "{:,.1f} s in this folder"} if is_resumed else {}
    speed = _numbers(summary, seconds=seconds, **total, images_per_second="{:,.1f} images/s")
    ranks = [count(summary["world_size"], "rank")] if is_number(summary.get("world_size")) else []
    where = [str(summary[name]) for name in ("device", "precision") if name in summary]
    return ", ".join([*speed, *ranks, *where])


def _step(summary: Mapping[str, Any]) -> str:
    """Return the shares of a step's time, the largest first, which limits the run; none of less than 0.05%."""
    waits = {what: summary.get(name) for what, name in WAITS.items()}
    known = {what: float(share) for what, share in waits.items() if share is not None and is_number(share)}
    if len(known) == len(waits):  # waits for slow ranks are part of those for gradients
        known[GRADIENTS] = max(0.0, known[GRADIENTS] - known[SLOW_RANKS])
    if not known:
        return ""
    shares = {"computing": max(0.0, 1.0 - sum(known.values())), **known}
    first, *others = sorted(shares, key=lambda what: -shares[what])
    rest = "".join(f"; {what} {shares[what]:.1%}" for what in others if shares[what] >= 0.0005)
    unknown = "" if len(known) == len(waits) else "; waits for gradients were not measured"
    return f"limited by {first}, {shares[first]:.1%} of the time{rest}{unknown}"


def _input(summary: Mapping[str, Any]) -> str:
    (rate,) = [*_numbers(summary, loader_images_per_second="{:,.1f}")] or [""]
    slowest = f"; its slowest stage is {limit}" if (limit := summary.get("input_limit")) else ""
    return rate and f"{rate} images/s alone, without training{slowest}"


def _ranks(summary: Mapping[str, Any]) -> str:
    """Return how often ranks were lost and joined, and the seconds in all until steps continued."""
    texts = []
    for thing, number in {"loss": "num_rank_losses", "join": "num_rank_joins"}.items():
        times = [count(summary[number], thing)] if is_number(summary.get(number)) else []
        seconds = _numbers(summary, **{f"rank_{thing}_seconds": "{:,.1f} s until steps continued"})
        texts.append(", ".join([*times, *seconds]))
    return "; ".join(filter(None, texts))


def _skipped(summary: Mapping[str, Any]) -> str:
    skipped = summary.get("skipped")
    if not skipped or not isinstance(skipped, list):
        return ""
    return f"{count(len(skipped), 'bad image')}: {'; '.join(map(str, skipped[:MAX_SHOWN]))}{_more(skipped)}"


def _more(found: list[Any]) -> str:
    return f", and {len(found) - MAX_SHOWN} more in summary.json" if len(found) > MAX_SHOWN else ""
