"""The simulator's all-reduce beside published tables of NCCL's own tests."""

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.twin.nccl_tests import TABLES, errors_of, main
from bigbatch.tools.simulate.cluster import load_cluster


def test_benchmark_prints_each_size_of_each_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["--out", str(tmp_path / "sums.json")])
    shown = capsys.readouterr().out
    assert all(table.name in shown for table in TABLES)
    # 2 * 7/8 MiB in 46.0 us are 39.9 GB/s: published; by the protocol LL it takes 0.27 * 56 + 16.3 us
    assert "1       39.9       58.4  -32%" in shown
    [first, *_] = json.loads((tmp_path / "sums.json").read_text())["tables"]
    assert first["rows"] == 10
    assert first["largest"] == pytest.approx(0.317, abs=0.001)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_published_sums_are_near_the_simulated_from_1_mebibyte_on(table) -> None:
    errors = [abs(error) for error in errors_of(table).values()]
    assert statistics.median(errors) <= 0.15
    assert max(errors) <= 0.4


@pytest.mark.parametrize("cluster", ["dgx_h100", "h200_roce400"])
def test_packaged_clusters_have_the_rate_of_their_switches(cluster: str) -> None:
    # 1 GiB on 8 H100 and H200: 464 and 466 GB/s published
    assert load_cluster(cluster).network.seconds(2**30) == pytest.approx(1.75 * 2**30 / 465e9, rel=0.06)
