"""The issue's targets beside the measurements. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]

SINGLES = ("native", "ring", "hierarchical", "sharded", "doubling")
SMALL_BYTES, LARGE_BYTES = 100_000, 10_000_000
LEAST_SHARE = {"200mbit": 0.97, "1gbit": 0.93}
LEAST_SMALL_RATIO = 3.0
MOST_HYBRID_RATIO = 1.05
LEAST_RATIO, LEAST_FP16_RATIO, LEAST_CYCLIC_RATIO = 1.25, 2.4, 2.0
MOST_CYCLIC_OVER_BLOCK = 1.03
"""Highest ratio that counts as no slower: two runs differ by this much."""
MOST_EXPOSED_RATIO = 1.05
LEAST_EXPOSED_PART = 0.1
"""Share of the time of all bytes: if the limit of the exposed time is below it, a ratio to it is not meaningful."""
MOST_OVERHEAD = 1.01
LEAST_EFFICIENCY = 0.95


@dataclass(frozen=True)
class Verdict:
    """One of the issue's targets and its measurement."""

    what: str
    case: str
    goal: str
    measured: str
    is_met: bool


def judge(records: Mapping[str, Record]) -> list[Verdict]:
    """Judge every target for which there are records."""
    found: list[Verdict] = []
    for case, record in records.items():
        found += JUDGES[record["benchmark"]](case, record)
    return found + judge_placement(records)


def judge_exchange(case: str, record: Record) -> list[Verdict]:
    """Judge share of the limit, short messages, hybrid against the best, and wrong elements."""
    rows = record["rows"]
    found = [_verdict_wrong(case, rows)]
    setting = record["conditions"]["setting"]
    sizes = sorted({row["size"] for row in rows})
    by_size = {size: {r["contestant"]: r for r in rows if r["size"] == size} for size in sizes}
    shares = {
        size: at["hybrid"]["limit_share"]
        for size, at in by_size.items()
        if size >= LARGE_BYTES and is_repeated(at, "hybrid") and at["hybrid"]["limit_share"] is not None
    }
    least = LEAST_SHARE.get(setting.get("link", ""))
    if shares and least:
        worst = min(shares, key=lambda size: shares[size])
        found.append(
            Verdict(
                f"hybrid's share of the limit from {show_size(LARGE_BYTES)} up",
                case,
                f"at least {least}",
                f"{shares[worst]:.3f} at {show_size(worst)}; " + ", ".join(f"{share:.3f}" for share in shares.values()),
                shares[worst] >= least,
            )
        )
    gains = {
        size: median(at["gloo"]) / median(at["hybrid"])
        for size, at in by_size.items()
        if size <= SMALL_BYTES and is_repeated(at, "hybrid", "gloo")
    }
    if gains:
        worst = min(gains, key=lambda size: gains[size])
        found.append(
            Verdict(
                f"hybrid against gloo up to {show_size(SMALL_BYTES)}",
                case,
                f"at least {LEAST_SMALL_RATIO:g} times faster",
                f"{gains[worst]:.1f} at {show_size(worst)}; best {max(gains.values()):.1f}",
                gains[worst] >= LEAST_SMALL_RATIO,
            )
        )
    losses = {size: hybrid_loss(at) for size, at in by_size.items() if is_repeated(at, "hybrid")}
    known = {size: loss for size, loss in losses.items() if loss}
    if known:
        worst = max(known, key=lambda size: known[size].ratio)
        loss = known[worst]
        singles = [at[name] for at in by_size.values() for name in SINGLES if name in at]
        once = sum(row["seconds"]["n"] == 1 for row in singles)
        found.append(
            Verdict(
                "hybrid against the best single algorithm, at any size",
                case,
                f"at most {MOST_HYBRID_RATIO} of its time",
                f"{loss.ratio:.3f} at {show_size(worst)} (best: {loss.best}, of {', '.join(loss.compared)}); "
                f"at all sizes {once} of {len(singles)} were measured once and do not count",
                loss.ratio <= MOST_HYBRID_RATIO,
            )
        )
    return found


@dataclass(frozen=True)
class HybridLoss:
    """Comparison of hybrid at one size with the single algorithms that were repeated there."""

    ratio: float
    """Hybrid's median over the best one's."""
    best: str
    compared: tuple[str, ...]


def hybrid_loss(at_size: Mapping[str, Any]) -> HybridLoss | None:
    """Compute hybrid's loss at one size; None if no single algorithm was repeated."""
    singles = tuple(name for name in SINGLES if is_repeated(at_size, name))
    if not singles:
        return None
    best = min(singles, key=lambda name: median(at_size[name]))
    return HybridLoss(median(at_size["hybrid"]) / median(at_size[best]), best, singles)


def judge_gradients(case: str, record: Record) -> list[Verdict]:
    """Judge against DDP and Horovod, at both wires; cyclic placement against DDP."""
    rows = {row["contestant"]: row for row in record["rows"]}
    found = [_verdict_wrong(case, record["rows"])]
    is_cyclic = record["conditions"]["setting"].get("place") == "cyclic"
    for ours, least in (
        ("ours tuned", LEAST_CYCLIC_RATIO if is_cyclic else LEAST_RATIO),
        ("ours fp16", LEAST_FP16_RATIO),
    ):
        for peer in ("ddp", "horovod"):
            if ours not in rows or peer not in rows or (is_cyclic and peer == "horovod"):
                continue
            ratio = median(rows[peer]) / median(rows[ours])
            limit = record["limit_seconds"] and record["limit_seconds"] * (0.5 if ours == "ours fp16" else 1)
            possible = f"; at the limit of the links it would be {median(rows[peer]) / limit:.2f}" if limit else ""
            found.append(
                Verdict(
                    f"{ours} against {peer}",
                    case,
                    f"at least {least:g} times faster",
                    f"{ratio:.2f} ({median(rows[ours]):.3f} s against {median(rows[peer]):.3f} s){possible}",
                    ratio >= least,
                )
            )
    return found


def judge_placement(records: Mapping[str, Record]) -> list[Verdict]:
    """Judge ours with cyclic placement against ours with block placement, in two runs."""
    found = []
    for case, record in records.items():
        block = records.get(case.removesuffix("-cyclic"))
        if not case.endswith("-cyclic") or block is None:
            continue
        for name in ("ours tuned", "ours fp16"):
            both = [row for each in (record, block) for row in each["rows"] if row["contestant"] == name]
            if len(both) == 2:
                ratio = median(both[0]) / median(both[1])
                found.append(
                    Verdict(
                        f"{name}, cyclic against block placement",
                        case,
                        f"no slower (up to {MOST_CYCLIC_OVER_BLOCK} of its time)",
                        f"{ratio:.3f}",
                        ratio <= MOST_CYCLIC_OVER_BLOCK,
                    )
                )
    return found


def judge_step(case: str, record: Record) -> list[Verdict]:
    """Judge exposed communication at fp32 against its limit, unless backward can hide nearly all of it."""
    rows = {row["contestant"]: row for row in record["rows"]}
    name = "ours tuned" if "ours tuned" in rows else "ours"
    row = rows.get(name, {})
    if "exposed_over_limit" not in row:
        return []
    if row["limit_exposed_seconds"]["median"] < LEAST_EXPOSED_PART * row["bytes_seconds"]:
        return []
    ratio = row["exposed_over_limit"]["median"]
    ddp = rows.get("ddp", {}).get("exposed_over_limit", {}).get("median")
    goal = f"at most {MOST_EXPOSED_RATIO} of the limit"
    measured = f"{ratio:.3f}" + (f" (DDP: {ddp:.3f})" if ddp else "")
    return [Verdict(f"{name}: exposed communication", case, goal, measured, ratio <= MOST_EXPOSED_RATIO)]


def judge_scaling(case: str, record: Record) -> list[Verdict]:
    """Judge scaling efficiency, if the links allow it."""
    wrong = sum(record["num_wrong"].values())
    found = [Verdict("wrong values, all contestants", case, "none", str(wrong), wrong == 0)]
    for row in record["rows"]:
        if row["contestant"] != "ours tuned" or row.get("limit_efficiency", 0) < LEAST_EFFICIENCY:
            continue
        efficiency = row["efficiency"]["median"]
        peers = {
            each["contestant"]: each["efficiency"]["median"]
            for each in record["rows"]
            if each["scaling"] == row["scaling"] and each["contestant"] in ("ddp", "horovod")
        }
        others = "".join(f"; {name} {value:.3f}" for name, value in peers.items())
        found.append(
            Verdict(
                f"ours tuned: {row['scaling']} scaling efficiency",
                case,
                f"at least {LEAST_EFFICIENCY} (the links allow {row['limit_efficiency']:.3f})",
                f"{efficiency:.3f}{others}",
                efficiency >= LEAST_EFFICIENCY,
            )
        )
    return found


def judge_overhead(case: str, record: Record) -> list[Verdict]:
    """Judge the reducer alone, in CUDA graphs; without a GPU there is no target."""
    graph = record["results"].get("CUDA graph")
    if not graph:
        return []
    ratio = graph["ratio"]["median"]
    goal = f"at most {MOST_OVERHEAD} of the time without it"
    return [Verdict("the reducer on one GPU, CUDA graphs", case, goal, f"{ratio:.4f}", ratio <= MOST_OVERHEAD)]


def _verdict_wrong(case: str, rows: Iterable[Record]) -> Verdict:
    wrong = sum(row["num_wrong"] for row in rows)
    return Verdict("wrong values, all contestants", case, "none", str(wrong), wrong == 0)


def median(row: Record) -> float:
    """Return the median of a row's seconds."""
    return float(row["seconds"]["median"])


def is_repeated(at_size: Mapping[str, Any], *names: str) -> bool:
    """Return whether all of them have more than their first sum."""
    return all(name in at_size and at_size[name]["seconds"]["n"] > 1 for name in names)


def show_size(num_bytes: int) -> str:
    """Show 1000 as '1 KB'; decimal units."""
    for unit, name in ((1_000_000, "MB"), (1_000, "KB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:g} {name}"
    return f"{num_bytes} B"


def judge_ways(case: str, record: Record) -> list[Verdict]:
    """Judge wrong gradients."""
    return [_verdict_wrong(case, record["rows"])]


JUDGES = {
    "ways": judge_ways,
    "exchange": judge_exchange,
    "gradients": judge_gradients,
    "step": judge_step,
    "scaling": judge_scaling,
    "reducer_overhead": judge_overhead,
}
