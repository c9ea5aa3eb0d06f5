"""Who is measured beside who is the fastest, with sums that follow a closed form but for one."""

import json

import pytest

from benchmarks.twin.ranking import compare, main, ranking_of

RECORD = {
    "case": "exchange-2x1-500us",
    "conditions": {"groups": [[0], [1], [2], [3]]},
    "goodput_bits_per_second": [8e8, 8e8],
}
"""Four nodes of one rank, 100 MB/s, hops of 200 + 500 us: the ring, leaders and shards are alike, 6 hops of M/4."""


def medians(**seconds):
    return {name: {"median": each} for name, each in seconds.items()}


def test_benchmark_counts_the_fastest_among_the_few_and_the_loss_where_it_is_not(tmp_path, capsys):
    ranking = ranking_of(RECORD)
    assert ranking.seconds_by["ring"](4_000_000) == pytest.approx(6 * (7e-4 + 1e6 / 1e8))
    assert ranking.seconds_by["doubling"](4_000_000) == pytest.approx(2 * (7e-4 + 4e6 / 1e8))
    times = {
        "4000000": medians(native=0.001, ring=0.06, hierarchical=0.06, sharded=0.06, doubling=0.04),
        "1024": medians(ring=0.004, hierarchical=0.004, sharded=0.004, doubling=0.001),
        "9": medians(ring=1.0),  # too few to say anything
    }
    long, short = compare(ranking, times)
    # three that are alike come before doubling: all three are measured for the first, and doubling is the fastest
    assert long.num_measured == {1: 3, 2: 3, 3: 3}
    assert long.losses[3] == pytest.approx(0.06 / 0.04 - 1)
    assert short.num_measured == {1: 1, 2: 4, 3: 4}
    assert set(short.losses.values()) == {0.0}
    (tmp_path / "comm-one.json").write_text(json.dumps({**RECORD, "tuned": {"hybrid": {"times": times}}}))
    (tmp_path / "comm-none.json").write_text(json.dumps({"case": "none"}))
    main(["--results", str(tmp_path)])
    _, one, both = capsys.readouterr().out.splitlines()
    assert one.split()[:5] == ["exchange-2x1-500us", "2", "1", "1", "1"]
    assert both.split()[1:5] == one.split()[1:5]
    assert "50%" in one
