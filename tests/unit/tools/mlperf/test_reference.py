"""The test of epochs against MLPerf's records: MLPerf's own checker and scipy are the judges."""

import sys

import pytest

from bigbatch.errors import UserError
from bigbatch.tools.mlperf.reference import RULESET, fewest_epochs, read_reference

rcp_checker = pytest.importorskip("mlperf_logging.rcp_checker.rcp_checker")
stats = pytest.importorskip("scipy.stats")


def checker() -> rcp_checker.RCP_Checker:
    return rcp_checker.RCP_Checker("training", RULESET, "resnet", False)


BATCHES = [record["BS"] for record in checker().rcp_data.values()]


@pytest.mark.parametrize("batch", BATCHES)
def test_reference_the_test_of_five_runs_is_that_of_mlperf(batch: int) -> None:
    record, reference = checker()._find_rcp(batch, "full_rcps"), read_reference(batch)
    assert reference is not None
    assert reference.mean_epochs == pytest.approx(record["RCP Mean"])
    assert reference.range_epochs == (min(record["Epochs to converge"]), max(record["Epochs to converge"]))
    assert fewest_epochs(reference, num_runs=5) == pytest.approx(record["Min Epochs"], abs=1e-4)


@pytest.mark.parametrize("batch", [2048, 2500, 6144, 16384, 64480])
def test_reference_between_records_it_interpolates_as_mlperf_does(batch: int) -> None:
    theirs = checker()
    low, high = theirs._find_top_min_rcp(batch, "full_rcps"), theirs._find_bottom_max_rcp(batch, "full_rcps")
    _, record = theirs._create_interp_rcp(batch, low, high)
    reference = read_reference(batch)
    assert reference is not None
    assert reference.name == f"between the records of {low['BS']:,} and {high['BS']:,}"
    assert reference.range_epochs is None
    assert reference.mean_epochs == pytest.approx(record["RCP Mean"])
    assert fewest_epochs(reference, num_runs=5) == pytest.approx(record["Min Epochs"], abs=1e-4)


def test_reference_outside_of_the_records() -> None:
    smallest = read_reference(256)
    assert smallest is not None
    assert smallest.name == "record of 1,632, the smallest batch"
    assert read_reference(67_841) is None


@pytest.mark.parametrize("num_runs", [3, 5, 12])
def test_reference_the_bound_is_where_a_t_test_turns(num_runs: int) -> None:
    """scipy's own test, from means and spreads: p = 5% at the bound, one-sided."""
    reference = read_reference(8192)
    assert reference is not None
    bound = fewest_epochs(reference, num_runs=num_runs)
    spread = reference.std_epochs
    found = stats.ttest_ind_from_stats(
        bound, spread, num_runs - 2, reference.mean_epochs, spread, reference.num_runs, alternative="less"
    )
    assert found.pvalue == pytest.approx(0.05)


@pytest.mark.parametrize("module", ["mlperf_logging", "scipy"])
def test_reference_a_missing_package_names_the_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"pip install -e '.\[verify\]'"):
        read_reference(8192)
