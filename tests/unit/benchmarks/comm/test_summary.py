"""Tables made of the records."""

from pathlib import Path
from typing import Any

from benchmarks.comm import summary
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


def row(contestant: str, seconds: float) -> dict[str, Any]:
    """Return a row of a record, with the facts that every benchmark writes."""
    spread = {"n": 10, "median": seconds, "min": 0.9 * seconds, "max": 1.1 * seconds}
    return {"contestant": contestant, "seconds": spread, "num_wrong": 0, "node_bytes": 15, "cores_used": 1.5}


def gradients_record(**seconds: float) -> dict[str, Any]:
    """A record of gradients.py."""
    return {
        "benchmark": "gradients",
        "conditions": FACTS,
        "goodput_bits_per_second": [956e6, 955e6],
        "model": "resnet50",
        "num_bytes": 100_000_000,
        "limit_seconds": 1.2,
        "rows": [row(name.replace("_", " "), value) for name, value in seconds.items()],
    }


def test_summary_has_every_case(tmp_path: Path) -> None:
    names = ("gradients-alexnet_bn-1gbit", "gradients-resnet50-1gbit")
    records = {name: gradients_record(ours_tuned=1.0, ddp=1.2) for name in names}
    for name, record in records.items():
        write_record(tmp_path / f"comm-{name}.json", record)
    (tmp_path / "comm-wire-precision.json").write_text('{"conditions": {}, "rows": []}')
    (tmp_path / "comm-rounding.json").write_text('{"benchmark": "rounding", "rows": []}')
    assert list(summary.read_records(tmp_path)) == list(records), "other JSON is left alone"
    text = summary.summarise(records)
    assert "| ours tuned | 1.000 | 0.900 to 1.100 | 10 | 1.20 |" in text
    assert "Commit abc; 2 cores of an EPYC" in text
    assert text.count("Commit abc, 2026-01-02, an EPYC.") == 2, "of each case: they may differ"
    assert "mpi4py 4" in text
    assert "horovod" not in text
