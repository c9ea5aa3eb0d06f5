"""Verdicts of preflight on nodes made by hand: which nodes are named, also of those that do not meet."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hand_made_nodes import GBIT, blamed, cluster, node, place, texts

from bigbatch.tools.preflight import meeting
from bigbatch.tools.preflight.findings import find_faults, find_minority, gbit, remarks, unjudged_link
from bigbatch.tools.preflight.meeting import absence_findings, host_faults
from bigbatch.trainer.machine.gpu_driver import Clock

NOISY = [
    node(f"n{i}", multiply_gflops=700e3 * share, copy_gb_per_second=1500 * share, link_bytes_per_second={"x": share})
    for i, share in enumerate((1.0, 0.85, 1.1, 0.95))
]


@pytest.mark.parametrize(
    "nodes",
    [
        *([node(f"n{i}") for i in range(count)] for count in (1, 2, 3, 4, 9)),
        NOISY,
        cluster(2, rate=lambda a, b: GBIT),  # slow links of two nodes have none to compare with
    ],
)
def test_equal_nodes_are_fit(nodes: list[Any]) -> None:
    assert find_faults(nodes) == []


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (
            {"multiply_gflops": 350_000.0, "rounds": {"multiply_gflops": [350e3, 349e3, 330e3]}},
            "n1: multiplies matrices at 350,000.0 GFLOP/s (best of 3, lowest 330,000.0), the median node at 700,000.0 "
            "GFLOP/s (best of 1, lowest 700,000.0): ",
        ),
        (
            {"copy_gb_per_second": 750.0, "rounds": {"copy_gb_per_second": [740.0, 750.0]}},
            "n1: copies memory at 750.0 GB/s (best of 2, lowest 740.0), the median node at 1,500.0 GB/s (best of 1, ",
        ),
    ],
)
def test_node_slowed_by_half_is_named(count: int, odd: dict[str, Any], told: str) -> None:
    nodes = cluster(count, **odd)
    (text,) = texts(nodes)
    assert text.startswith(told)
    assert blamed(nodes) == ["n1"]


@pytest.mark.parametrize("count", [3, 4, 5, 16])
def test_link_at_a_tenth_is_named_and_not_its_partners(count: int) -> None:
    nodes = cluster(count, rate=lambda a, b: (10 if 1 in (a, b) else 100) * GBIT)
    (text,) = texts(nodes)
    assert text.startswith(
        "n1: its link carries 10.00 Gbit/s (best of 1, lowest 10.00), the median node's 100.00 Gbit/s"
    )
    assert blamed(nodes) == ["n1"]


NOISE = "noise: repeated measurements differ as much, so no node is named: "


@pytest.mark.parametrize(
    ("rounds", "usual", "is_noise"),
    [
        # the figures of 30 November 2026: 55.1 beside 79.5, apart by 24.4
        ([54.0, 55.1, 53.2], [78.0, 79.5], False),
        ([30.0, 55.1, 44.0], [78.0, 79.5], True),
        ([54.0, 55.1, 53.2], [55.0, 79.5], False),  # its own measurements agree
        ([30.8, 55.1], [79.5], False),
        ([30.6, 55.1], [79.5], True),
    ],
)
def test_difference_within_the_spread_of_the_rounds_is_noise(
    rounds: list[float], usual: list[float], is_noise: bool
) -> None:
    nodes = [node(f"n{i}", multiply_gflops=79.5, rounds={"multiply_gflops": usual}) for i in range(4)]
    nodes[3] = replace(nodes[3], multiply_gflops=55.1, rounds={"multiply_gflops": rounds})
    text = (
        f"n3: multiplies matrices at 55.1 GFLOP/s (best of {len(rounds)}, lowest {min(rounds)}), the median node at "
        f"79.5 GFLOP/s (best of {len(usual)}, lowest {min(usual)}): look for other processes, heat and power caps"
    )
    assert (texts(nodes), remarks(nodes)) == (([], [NOISE + text]) if is_noise else ([text], []))


@pytest.mark.parametrize("hosts", [{1}, {1, 3}])
@pytest.mark.parametrize("first", [11.0, 9.0])
def test_link_within_the_spread_of_its_rounds_is_noise(hosts: set[int], first: float) -> None:
    """Links of a node, or one path, carry 55 Gbit/s at best beside 100: 45 less, of which 55 - 9 makes noise."""
    nodes = cluster(rate=lambda a, b: (55 if hosts <= {a, b} else 100) * GBIT)
    rounds = {f"n{i}": [first * GBIT, 55 * GBIT] for i in range(4)}
    nodes[1] = replace(nodes[1], rounds=rounds if hosts == {1} else {"n3": rounds["n3"]})
    (text,) = remarks(nodes) if 55 - first > 45 else texts(nodes)
    start = "n1: its link carries" if hosts == {1} else "n1 to n3:"
    assert text.startswith(f"{NOISE if first == 9 else ''}{start} 55.00 Gbit/s (best of 2, lowest {first:.2f}), the ")
    assert len([*texts(nodes), *remarks(nodes)]) == 1
    assert blamed(nodes) == (["n1"] if first == 11 and hosts == {1} else [])


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (0.55, "its ranks got 55% of their cores' time, so a neighbour's load slows it, not the hardware"),
        (0.97, "its ranks got 97% of their cores' time, so no other process slows it: look for heat and power caps"),
        (None, "look for other processes, heat and power caps"),
    ],
)
def test_slow_node_is_told_from_a_neighbours_load(share: float | None, told: str) -> None:
    (text,) = texts(cluster(4, multiply_gflops=350_000.0, cpu_share=share))
    assert told in text


def test_nothing_measured_has_no_remarks() -> None:
    """A rank did not answer, so that no node was measured."""
    assert remarks([]) == []


def test_only_link_of_two_nodes_is_not_called_fit() -> None:
    slow = cluster(2, rate=lambda a, b: 0.1 * GBIT)
    assert unjudged_link(slow) == (
        "the link of n0 and n1 carries 0.10 Gbit/s and cannot be judged: no third node, no stated rate; state it by "
        "--link-gbit"
    )
    assert unjudged_link([replace(each, has_link_rate=True) for each in slow]) is None
    assert unjudged_link(cluster(3)) is None
    assert unjudged_link([node("n0"), node("n1")]) is None


def test_slow_path_between_two_good_nodes_is_a_pair() -> None:
    nodes = cluster(rate=lambda a, b: (10 if {a, b} == {1, 3} else 100) * GBIT)
    (text,) = texts(nodes)
    assert text == (
        "n1 to n3: 10.00 Gbit/s (best of 1, lowest 10.00), the median node's link 100.00 Gbit/s (best of 1, lowest "
        "100.00)"
    )
    assert blamed(nodes) == []


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"versions": {"torch": "2.10.0", "bigbatch": "0.1.0 abc"}}, "n1: torch 2.10.0, elsewhere 2.14.1"),
        ({"versions": {"torch": "2.14.1", "bigbatch": "0.1.0 def+"}}, "n1: bigbatch 0.1.0 def+, elsewhere 0.1.0 abc"),
        ({"versions": {"torch": "2.14.1", "bigbatch": "0.1.0 abc", "driver": "5"}}, "n1: driver 5, elsewhere none"),
        ({"device": "NVIDIA A100"}, "n1: device NVIDIA A100, elsewhere NVIDIA H100"),
        ({"free_gb": {"runs": 0.2}}, "n1: runs has 0.2 GB left, below 1: free some"),
        ({"free_gb": {"/dev/shm": 0.064}}, "n1: /dev/shm has 0.064 GB left, below 0.5: free some, or start the"),
        ({"free_gb": {}, "disk_trouble": {"runs": "no answer within 8 s"}}, "n1: runs: no answer within 8 s"),
        ({"complaint": "data/train: no such folder"}, "n1: data/train: no such folder"),
        ({"images": {"classes": 1000, "training": 5, "validation": 6}}, "n1: has 1,000 classes, 5 training, 6 valid"),
        ({"address": "127.0.1.1"}, "n1: its address is 127.0.1.1, which other nodes cannot reach"),
        ({"hardware": {"RDMA ports": "7 of 400 Gbit/s"}}, "n1: RDMA ports 7 of 400 Gbit/s, elsewhere none"),
        ({"troubles": {"driver": ["nvidia-smi: no answer"]}}, "n1: nvidia-smi: no answer: see nvidia-smi there"),
    ],
)
def test_odd_node_is_named(odd: dict[str, Any], told: str) -> None:
    nodes = cluster(**odd)
    (text,) = texts(nodes)
    assert text.startswith(told)
    assert blamed(nodes) == ["n1"]


@pytest.mark.parametrize(
    "shared",
    [
        {"free_gb": {"runs": 0.2}},
        {"free_gb": {}, "disk_trouble": {"runs": "no answer within 8 s"}},
        {"address": "127.0.1.1"},
        {"troubles": {"locked memory": ["a rank may lock 64 KiB, below 1,048,576"]}},
        {"clocks": {0: Clock(900.0, ("heat",))}},
        {"complaint": "data/train: no such folder", "images": {}},
    ],
)
def test_what_all_nodes_have_is_no_nodes_fault(shared: dict[str, Any]) -> None:
    nodes = [node(f"n{i}", **shared) for i in range(3)]
    assert blamed(nodes) == []
    assert texts(nodes) == ["data/train: no such folder"] if "complaint" in shared else len(find_faults(nodes)) == 3


def test_node_that_no_other_node_reaches_or_that_reaches_none_is_named_once() -> None:
    nodes = [replace(each, unreachable=("n1",)) for each in cluster()]
    nodes[1] = replace(nodes[1], unreachable=())
    (text,) = texts(nodes)
    assert text.startswith("n1: 3 of 3 nodes cannot connect to 10.0.0.1; it cannot connect to 0 of them: ")
    assert blamed(nodes) == ["n1"]
    (text,) = texts(cluster(unreachable=("n0", "n2", "n3")))
    assert text.startswith("n1: 0 of 3 nodes cannot connect to 10.0.0.1; it cannot connect to 3 of them: ")


@pytest.mark.parametrize("count", [2, 4])
def test_pair_that_does_not_meet_is_named(count: int) -> None:
    assert texts(cluster(count, unreachable=("n0",))) == ["n1 cannot connect to n0: a firewall or a route between them"]


@pytest.mark.parametrize(
    ("clock", "told"),
    [
        (Clock(900.0, ()), "n1: the GPU of rank 3 runs at 900 MHz; the median GPU runs at 1,980: look at "),
        (Clock(1980.0, ("heat",)), "n1: the GPU of rank 3 runs at 1,980 MHz, slowed by heat; the median GPU runs at "),
    ],
)
def test_gpu_with_a_low_clock_is_named(clock: Clock, told: str) -> None:
    nodes = [node(f"n{i}", clocks={2 * i: Clock(1980.0, ()), 2 * i + 1: Clock(1755.0, ())}) for i in range(4)]
    assert find_faults(nodes) == []
    nodes[1] = replace(nodes[1], clocks={2: Clock(1980.0, ()), 3: clock})
    (text,) = texts(nodes)
    assert text.startswith(told)
    assert blamed(nodes) == ["n1"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"free_gb": {"/dev/shm": 0.1}}, {"free_gb": {"runs": 0.2}}),
        ({"free_gb": {"runs": 0.2}}, {"disk_trouble": {"runs": "no answer within 8 s"}}),
        ({"clocks": {0: Clock(1980.0, ("heat",))}}, {"clocks": {1: Clock(1980.0, ("its power supply's brake",))}}),
        (
            {"clocks": {0: Clock(900.0, ()), 1: Clock(1980.0, ()), 2: Clock(1980.0, ())}},
            {"clocks": {3: Clock(900.0, ()), 4: Clock(1980.0, ()), 5: Clock(1980.0, ())}},
        ),
    ],
)
def test_two_nodes_with_a_fault_of_their_own_are_both_named(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert blamed([node("n0", **first), node("n1", **second)]) == ["n0", "n1"]


@pytest.mark.parametrize(
    "fault", [{"clocks": {0: Clock(900.0, ("heat",))}}, {"free_gb": {"/dev/shm": 0.1}}, {"disk_trouble": {"runs": "x"}}]
)
def test_node_alone_is_named_too(fault: dict[str, Any]) -> None:
    assert blamed([node("n0", **fault)]) == ["n0"]


def test_odd_ones_of_two_camps() -> None:
    assert find_minority({"a": 1, "b": 2}) == [("b", "1")]
    assert find_minority({"a": 1, "b": 2, "c": 2}) == [("a", "2")]
    assert find_minority({"a": {}, "b": {}}) == []


def test_remarks_are_told_beside_findings() -> None:
    assert remarks(cluster()) == []
    short = {"classes": 1000, "training": 2_561_034, "validation": 50_000}
    assert remarks([node("n0", images=short)]) == [
        "1,000 classes, but 2,561,034 training and 50,000 validation images: ImageNet has 1,281,167 and 50,000"
    ]
    cores = {"troubles": {"cores": ["1 cores for 2 ranks"]}}
    assert remarks([node("n0"), node("n1", **cores), node("n2", **cores)]) == [
        "n1, n2: 1 cores for 2 ranks: ask for more (--cpus-per-rank)"
    ]
    assert find_faults([node("n0", **cores)]) == [], "a remark ends no job"
    assert remarks([node("n0", images={"classes": 10, "training": 5, "validation": 1})]) == []
    assert gbit(1.25e9) == "10.00 Gbit/s"


# --- the meeting ---


def test_equal_places_fit() -> None:
    assert host_faults([place(0), place(1)]) == []
    assert host_faults([place(0, num_gpus=0)]) == []


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("complaint", [None, "8 ranks on n1 but 7 GPUs"])
def test_node_that_lacks_a_gpu_is_named(count: int, complaint: str | None) -> None:
    odd = place(1, num_gpus=7, complaint=complaint)
    (finding,) = host_faults([odd if number == 1 else place(number) for number in range(count)])
    assert finding.text == "n1: 7 GPUs, elsewhere 8: look at nvidia-smi and the kernel's log there"
    assert finding.hosts == ("n1",)


def test_too_few_gpus_everywhere_are_no_nodes_fault() -> None:
    found = host_faults([place(number, num_gpus=4, complaint=f"8 ranks on n{number} but 4 GPUs") for number in (0, 1)])
    assert [finding.text for finding in found] == ["8 ranks on n0 but 4 GPUs", "8 ranks on n1 but 4 GPUs"]
    assert [finding.hosts for finding in found] == [(), ()]


def test_two_nodes_of_one_name_are_told() -> None:
    (finding,) = host_faults([place(0, host="localhost"), place(1, host="localhost"), place(2)])
    assert finding.text.startswith("2 nodes have the host name localhost (ranks 0, 8)")
    assert finding.hosts == ()


def test_silent_node_is_told_apart_from_a_silent_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[0-3]")
    control = SimpleNamespace(world_size=8, host_of=lambda rank: f"n{rank // 2}")
    (finding,) = absence_findings([4, 5, 7], control)  # type: ignore[arg-type]
    assert finding.text.startswith("no answer from ranks 4-5, 7, on n2 within 12 s: see whether its processes started")
    assert finding.hosts == ("n2",)
    (finding,) = absence_findings([7], control)  # type: ignore[arg-type]
    assert finding.text.startswith("no answer from rank 7 within 12 s: ")
    assert finding.hosts == ()
    assert absence_findings([], control) == []  # type: ignore[arg-type]


def test_thousands_of_ranks_have_more_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits 12 s and 25 ms for each rank: 63.2 s at 2,048. The others wait 10 s more for its report."""
    now = [0.0]
    monkeypatch.setattr(meeting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(meeting.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    control: Any = SimpleNamespace(rank=0, world_size=2048, has_met=lambda rank: rank != 7 and now[0] > 60)
    control.store = SimpleNamespace(set=lambda key, text: setattr(control, "read", lambda *_, **named: text))
    assert meeting.absent_ranks(control) == [7]
    assert now[0] == pytest.approx(63.2, abs=0.1)
    assert control.timeout_seconds == pytest.approx(73.2)
    control.host_of = lambda rank: f"n{rank}"
    (finding,) = absence_findings([7], control)
    assert finding.text.startswith("no answer from rank 7 within 63 s: ")
