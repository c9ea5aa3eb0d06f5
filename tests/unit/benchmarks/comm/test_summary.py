"""Verdicts, tables and images made of the records."""

from pathlib import Path
from typing import Any

import pytest
from benchmark_process import run_benchmark

from benchmarks.comm import (
    cases,
    plot,
    summary,
    targets,
)
from benchmarks.comm import run as driver
from benchmarks.record import write_record

SETTING = {"ranks_per_node": "2,2,2,2", "link": "1gbit", "delay": "0", "place": "block"}
FACTS = {
    "commit": "abc",
    "cores": [2],
    "machine": "an EPYC",
    "memory_gib": 24,
    "kernel": "Linux 6",
    "python": "3.11",
    "torch": "2",
    "versions": {"mpi4py": "4", "horovod": None},
    "congestion_control": {"system": "bbr", "backend tcp": "cubic"},
    "date": "2026-01-02T03:04:05",
    "setting": SETTING,
}


def row(contestant: str, seconds: float, *, n: int = 10, **more: Any) -> dict[str, Any]:
    """Of a record, with what every benchmark writes."""
    spread = {"n": n, "median": seconds, "min": 0.9 * seconds, "max": 1.1 * seconds}
    return {"contestant": contestant, "seconds": spread, "num_wrong": 0, "node_bytes": 15, "cores_used": 1.5} | more


def exchange_record(*rows: dict[str, Any]) -> dict[str, Any]:
    """A record of exchange.py."""
    return {
        "benchmark": "exchange",
        "conditions": FACTS,
        "goodput_bits_per_second": [956e6, 955e6],
        "tuned": {"hybrid": {"table": "doubling at any size"}},
        "rows": list(rows),
    }


def gradients_record(*, place: str = "block", **seconds: float) -> dict[str, Any]:
    """A record of gradients.py."""
    return {
        "benchmark": "gradients",
        "conditions": FACTS | {"setting": SETTING | {"place": place}},
        "goodput_bits_per_second": [956e6, 955e6],
        "model": "resnet50",
        "num_bytes": 100_000_000,
        "limit_seconds": 1.2,
        "rows": [row(name.replace("_", " "), value) for name, value in seconds.items()],
    }


def verdicts(records: dict[str, Any]) -> dict[tuple[str, str], bool]:
    """(target, case) -> met."""
    return {(v.what, v.case): v.is_met for v in targets.judge(records)}


def test_verdicts_of_an_exchange() -> None:
    def at(size: int, hybrid: float, best: float, gloo: float, share: float, n: int = 10) -> list[dict[str, Any]]:
        facts = {"size": size, "limit_share": share}
        return [
            row("hybrid", hybrid, n=n, **facts),
            row("hierarchical", best, n=n, **facts),
            row("ring", 0.01, n=1, **facts),  # once: no claim
            row("gloo", gloo, n=n, **facts),
        ]

    good = exchange_record(*at(1000, 1.0, 1.0, 4.0, 0.1), *at(10**7, 1.04, 1.0, 1.0, 0.94))
    assert set(verdicts({"x": good}).values()) == {True}
    bad = exchange_record(*at(1000, 1.0, 0.9, 2.0, 0.1), *at(10**7, 1.0, 1.0, 1.0, 0.92))
    bad["rows"][0]["num_wrong"] = 3
    assert set(verdicts({"x": bad}).values()) == {False}
    assert len(verdicts({"x": bad})) == 4
    text = {v.what: v.measured for v in targets.judge({"x": good})}
    assert text["hybrid against the best single algorithm, at any size"] == (
        "1.040 at 10 MB (best: hierarchical, of hierarchical); at all sizes 2 of 4 were measured once and do not count"
    )
    once = exchange_record(*at(10**7, 1.0, 0.5, 1.0, 0.5, n=1))
    assert list(verdicts({"x": once})) == [("wrong values, all contestants", "x")]


def test_verdicts_of_gradients_and_placement() -> None:
    block = gradients_record(ours_tuned=1.0, ours_fp16=0.5, ddp=1.3, horovod=1.2)
    cyclic = gradients_record(place="cyclic", ours_tuned=1.02, ours_fp16=0.6, ddp=2.1)
    found = verdicts({"r": block, "r-cyclic": cyclic})
    assert found[("ours tuned against ddp", "r")]
    assert not found[("ours tuned against horovod", "r")]
    assert found[("ours fp16 against ddp", "r")]
    assert found[("ours tuned against ddp", "r-cyclic")]
    assert found[("ours tuned, cyclic against block placement", "r-cyclic")]
    assert not found[("ours fp16, cyclic against block placement", "r-cyclic")]


def test_verdicts_of_steps_and_the_reducer() -> None:
    def exposed(ratio: float, limit: float) -> dict[str, Any]:
        both = {"exposed_over_limit": {"median": ratio}, "limit_exposed_seconds": {"median": limit}}
        return both | {"bytes_seconds": 1.0}

    record = {
        "benchmark": "step",
        "conditions": FACTS,
        "rows": [row("ours", 1.0, **exposed(1.06, 0.5)), row("ours fp16", 1.0, **exposed(9, 0.5))],
    }
    hidden = record | {"rows": [row("ours", 1.0, **exposed(9, 0.05))]}
    assert verdicts({"s": hidden}) == {}
    tuned = record | {"rows": [*record["rows"], row("ours tuned", 1.0, **exposed(1.04, 0.5))]}
    assert verdicts({"s": tuned}) == {("ours tuned: exposed communication", "s"): True}
    assert verdicts({"s": record}) == {("ours: exposed communication", "s"): False}
    overhead = {"benchmark": "reducer_overhead", "results": {"CUDA graph": {"ratio": {"median": 1.009}}}}
    assert list(verdicts({"o": overhead}).values()) == [True]
    assert verdicts({"o": {"benchmark": "reducer_overhead", "results": {"eager": {}}}}) == {}


def test_summary_has_every_case_and_verdict(tmp_path: Path) -> None:
    facts = {"size": 10**7, "limit_share": 0.94}
    records = {
        "exchange-4x2-1gbit": exchange_record(row("hybrid", 0.13, **facts), row("ring", 0.15, n=1, **facts)),
        "gradients-resnet50-1gbit": gradients_record(ours_tuned=1.0, ddp=1.2),
    }
    for name, record in records.items():
        write_record(tmp_path / f"comm-{name}.json", record)
    write_record(tmp_path / "comm-quick-x.json", records["exchange-4x2-1gbit"])
    (tmp_path / "comm-wire-precision.json").write_text('{"conditions": {}, "rows": []}')
    (tmp_path / "comm-rounding.json").write_text('{"benchmark": "rounding", "rows": []}')
    assert list(summary.read_records(tmp_path)) == list(records), "other JSON is left alone"
    assert list(summary.read_records(tmp_path, quick=True)) == ["x"]
    text = summary.summarise(records)
    assert "| 10 MB | 130 (0.94) | [150 (0.94)] |" in text
    assert "| ours tuned against ddp | gradients-resnet50-1gbit | at least 1.25 times faster | 1.20 " in text
    assert text.count("**not met**") == 1
    assert "Commit abc; 2 cores of an EPYC" in text
    assert text.count("Commit abc, 2026-01-02, an EPYC.") == 2, "of each case: they may differ"
    assert "mpi4py 4" in text
    assert "horovod" not in text.split("## Targets")[0]


def test_summary_names_every_machine_and_day() -> None:
    later = {**FACTS, "machine": "a Xeon", "date": "2026-01-09T03:04:05", "versions": {"horovod": "0.28"}}
    records = {str(n): {**exchange_record(), "conditions": facts} for n, facts in enumerate((later, FACTS))}
    head = summary.summarise(records).split("## Targets")[0]
    assert "2 cores of a Xeon, 24 GiB, 2 cores of an EPYC, 24 GiB" in head
    assert "horovod 0.28, mpi4py 4" in head
    assert "2026-01-02 to 2026-01-09." in head


def test_sizes_to_read() -> None:
    assert [targets.show_size(n) for n in (4, 1000, 300_000, 10**7, 256_000_000)] == [
        "4 B",
        "1 KB",
        "300 KB",
        "10 MB",
        "256 MB",
    ]
    assert plot.far_apart([1000, 3000, 10_000, 30_000, 100_000, 256_000]) == [1000, 10_000, 100_000]


@pytest.mark.slow
def test_image(tmp_path: Path) -> None:
    facts = {"limit_share": 0.5}
    rows = [row(name, 0.1, size=size, **facts) for name in ("hybrid", "gloo") for size in (1000, 10**6)]
    sets = {
        "gradients-resnet50-1gbit": gradients_record(ours_tuned=1.0, ours_fp16=0.5, ddp=1.3, horovod=3),
        "gradients-resnet50-1gbit-cyclic": gradients_record(place="cyclic", ours_tuned=1.0, ddp=2.5),
    }
    chosen = plot.chosen_sets(sets)
    assert list(chosen) == ["ResNet-50, 100 MB\n1 Gbit/s", "ResNet-50, 100 MB\n1 Gbit/s, cyclic ranks"]
    plot.draw([exchange_record(*rows)] * 2, chosen, tmp_path / "docs/comm.png")
    assert (tmp_path / "docs/comm.png").read_bytes().startswith(b"\x89PNG")


def test_case_that_fails_leaves_no_earlier_record(tmp_path: Path) -> None:
    case = cases.Case("broken", "no_such_module", seconds=10)
    path = cases.record_path(tmp_path, case, quick=False)
    path.write_text("{}")
    assert not driver.run_case(case, out=tmp_path, quick=False)
    assert not path.exists()


def test_driver_lists_its_cases() -> None:
    listed = run_benchmark("comm.run", "--list", "--only", "paced", check=True, timeout=60).stdout
    assert [line.split()[0] for line in listed.splitlines()] == [
        "step-resnet50-1gbit-paced",
        "step-resnet50-200mbit-paced",
    ]
    wrong = run_benchmark("comm.run", "--only", "moon", timeout=60)
    assert wrong.returncode == 2
    assert "no case has such a name" in wrong.stderr


def test_ways_are_summarised() -> None:
    quartiles = {"n": 5, "median": 2.0, "q1": 1.9, "q3": 2.1}
    row = {
        "way": "int8",
        "num_wrong": 0,
        "seconds": quartiles,
        "node_bytes": 4e7,
        "times_as_fast": quartiles,
        "cores_used": 1.5,
    }
    record = {
        "benchmark": "ways",
        "conditions": FACTS | {"load_average_at_start": 7.25},
        "goodput_bits_per_second": [956e6, 955e6],
        "model": "resnet50",
        "rows": [row],
    }
    assert [verdict.is_met for verdict in targets.judge({"a": record})] == [True]
    assert "| int8 | 2.000 | 40.0 | 2.00 (1.90 to 2.10) | 1.50 | 5 |" in summary.ways_table(record)
