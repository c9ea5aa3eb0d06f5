"""Tuning: choices from given times, what is said of them, and the command alone."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch.cli import main
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable, Measured
from bigbatch.comm.gradients.fusion import PlanSizes, TensorSpec
from bigbatch.comm.tuning import tuner
from bigbatch.comm.tuning.cost_model import LinkModel
from bigbatch.comm.tuning.measure import Hops, MeasuredLinks
from bigbatch.comm.tuning.plan_search import Backward, evaluate_plan, search_plan
from bigbatch.comm.tuning.report import explain, explain_links, explain_steps, times_head, times_line
from bigbatch.comm.tuning.tuned import make_cluster, read_tuned, write_tuned
from bigbatch.comm.tuning.tuner import choose
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.tune import communication as tune_comm

OTHER_CLUSTER = make_cluster(((0, 1), (2, 3)), backend="tcp", wire_dtype=None, device="cpu")


def exact(seconds: float) -> Measured:
    """A time without noise."""
    return Measured((seconds, seconds))


def latency_and_bandwidth(size: int) -> dict[str, Measured]:
    """doubling is quick for short tensors, ring for long ones; they meet at 100 KB."""
    return {"doubling": exact(0.001 + size * 3e-8), "ring": exact(0.003 + size * 1e-8)}


def only(algorithm: str) -> HybridTable:
    """The table of a config that names one algorithm."""
    return HybridTable((HybridRow(None, algorithm),))


TIMES = {4**k: latency_and_bandwidth(4**k) for k in range(5, 12)}
MANY = tuple(TensorSpec(f"t{i}", 50_000, 4, "float32") for i in range(20))
BACKWARD = Backward({f"t{i}": 0.01 * (i + 1) for i in range(20)}, 0.2)


def test_choice_follows_the_times() -> None:
    stated = PlanSizes(10_000_000, 10_000_000)
    findings = choose(MeasuredLinks(None, None), TIMES, BACKWARD, MANY, stated=stated, stated_table=only("doubling"))
    assert findings.table.algorithms == ("doubling", "ring")
    assert findings.table.rows[0].up_to_bytes == pytest.approx(100_000, rel=0.02)  # 1 ms + 30 ns/B, 3 ms + 10 ns/B
    # one buffer of 4 MB, ready at the end: all exposed, by line through 1 MB and 4 MB
    assert findings.stated.exposed_seconds == pytest.approx(0.001 + 4e6 * 3e-8, rel=1e-9)
    assert findings.stated_with_fastest.exposed_seconds == pytest.approx(0.003 + 4e6 * 1e-8, rel=1e-9)
    assert findings.least_exposed_seconds <= findings.chosen.exposed_seconds < 0.25 * 0.043
    again = evaluate_plan(findings.chosen.sizes, MANY, BACKWARD, tuner.seconds_by(TIMES, findings.table.choose))
    assert again == findings.chosen


def test_yardsticks_are_never_worse_than_the_choice() -> None:
    """A plan that sends a large gradient alone and its small neighbours together is no cut into runs of neighbours."""
    tensors = tuple(TensorSpec(name, n, 4, "float32") for name, n in (("a", 250), ("large", 25_000), ("b", 250)))
    backward = Backward({"a": 1.0, "large": 2.0, "b": 3.0}, 3.0)
    seconds = {1000: 3.0, 2000: 3.0, 100_000: 5.0, 101_000: 9.0, 102_000: 12.0}
    times = {size: {"ring": exact(value)} for size, value in seconds.items()}
    stated = PlanSizes(10_000_000, 10_000_000)
    findings = choose(MeasuredLinks(None, None), times, backward, tensors, stated=stated, stated_table=only("ring"))
    # large from 2 to 7, a and b together from 7 to 10; of runs: a 1 to 4, large 4 to 9, b 9 to 12
    assert findings.chosen.exposed_seconds == pytest.approx(7.0)
    assert findings.least_exposed_seconds == pytest.approx(7.0)


BY_TWENTY_MS = Backward({f"t{i}": 0.02 * (i + 1) for i in range(20)}, 0.4)
"""Of MANY, 200 KB each."""


def test_choice_keeps_what_the_config_states_where_it_is_faster() -> None:
    """Of plans within 0.2% of backward (0.8 ms) the fewest buffers win among themselves, but not over the config's."""
    times = {size: {"ring": exact(1.1e-3 + size * 0.2e-9)} for size in (1024, 4_000_000)}
    stated = PlanSizes(10_000_000, 400_000)
    findings = choose(MeasuredLinks(None, None), times, BY_TWENTY_MS, MANY, stated=stated, stated_table=only("ring"))
    assert findings.stated.exposed_seconds == pytest.approx(1.18e-3)  # the last of ten buffers
    assert (findings.chosen, findings.table) == (findings.stated, only("ring"))
    assert findings.searched.exposed_seconds == pytest.approx(1.9e-3)  # all in one
    (line,) = [line for line in explain_steps(findings) if "kept" in line]
    assert naming_all(line, "1.2 ms", "1.9 ms", "0.8 ms")


@pytest.mark.parametrize(("spread", "is_kept"), [(0.0, False), (0.2, False), (0.9, True)])
def test_choice_within_noise_of_what_the_config_states_is_not_made(spread: float, is_kept: bool) -> None:
    """One buffer ends with backward: 40 ms by ring, 30 ms by doubling, each four times, quartiles `spread` apart.

    Two standard errors of a median are 2 * 1.253 / 1.349 / sqrt(4) = 0.929 of that, and both together 50 ms times
    that and the spread: 9.3 ms at 0.2, and 42 ms at 0.9.
    """

    def times_of(seconds: float) -> Measured:
        apart = spread * seconds
        return Measured((seconds - apart / 2, seconds - apart / 2, seconds + apart / 2, seconds + apart / 2))

    tensors, backward = (TensorSpec("all", 1_000_000, 4, "float32"),), Backward({"all": 0.2}, 0.2)
    times = {4_000_000: {"ring": times_of(0.04), "doubling": times_of(0.03)}}
    stated = PlanSizes(10_000_000, 10_000_000)
    findings = choose(MeasuredLinks(None, None), times, backward, tensors, stated=stated, stated_table=only("ring"))
    assert findings.stated.exposed_seconds == pytest.approx(0.04)
    assert findings.searched.exposed_seconds == pytest.approx(0.03)
    assert findings.noise_seconds == pytest.approx(max(0.002 * 0.23, 0.05 * 0.929 * spread), rel=0.01)
    assert findings.table == only("ring" if is_kept else "doubling")
    assert sum("kept" in line for line in explain_steps(findings)) == is_kept


def test_plan_of_the_config_is_among_those_that_are_tried() -> None:
    """Of 40 gradients only a selection of sizes is; a very particular one, the fastest by far, is the config's."""
    tensors = tuple(TensorSpec(f"t{i}", 1000 + 7 * i, 4, "float32") for i in range(40))
    backward = Backward({f"t{i}": 0.001 * i for i in range(40)}, 0.04)
    stated = PlanSizes(1_000_000, 23_456)
    fast = {buffer.num_bytes for buffer in stated.plan(tensors).buffers}
    found = search_plan(tensors, backward, lambda size: 0.001 if size in fast else 1.0, stated=stated)
    assert found.plan == stated.plan(tensors)


def naming_all(text: str, *parts: str) -> bool:
    return all(part in text for part in parts)


def test_algorithm_that_was_not_measured_counts_as_the_table() -> None:
    stated = PlanSizes(10_000_000, 10_000_000)
    findings = choose(MeasuredLinks(None, None), TIMES, BACKWARD, MANY, stated=stated, stated_table=only("native"))
    assert findings.stated == findings.stated_with_fastest


def test_algorithm_that_was_given_up_counts_by_its_own_last_slope() -> None:
    given_up = {
        size: {name: at[name] for name in (("ring",) if size > 4**9 else ("ring", "doubling"))}
        for size, at in TIMES.items()
    }
    stated = PlanSizes(10_000_000, 10_000_000)
    findings = choose(MeasuredLinks(None, None), given_up, BACKWARD, MANY, stated=stated, stated_table=only("doubling"))
    assert findings.stated.exposed_seconds == pytest.approx(0.001 + 4e6 * 3e-8, rel=1e-9)


def test_times_of_a_larger_sum_are_as_cheap_per_byte_as_a_smaller_ones() -> None:
    """2 KiB in 2 s, 4 KiB within 15% of twice that; 8 KiB in less than four times that, 16 KiB in far more."""
    measured = {1024: 1.9, 2048: 2.0, 4096: 4.5, 8192: 7.0, 16384: 21.0}
    seconds_of = tuner.seconds_by({size: {"ring": exact(s)} for size, s in measured.items()}, lambda size: "ring")
    assert [seconds_of(size) for size in measured] == pytest.approx([1.9, 2.0, 4.0, 7.0, 21.0], rel=1e-12)
    assert seconds_of(32768) == pytest.approx(21.0 + 2 * 14.0, rel=1e-12)  # the last line goes on


def test_reasons() -> None:
    link = LinkModel(2e-6, 1.25e9)
    links = MeasuredLinks(inside=Hops(tuple((n, exact(link.seconds(n))) for n in (8, 1000, 1 << 40))), across=None)
    stated = PlanSizes(10_000_000, 10_000_000)
    findings = choose(links, TIMES, BACKWARD, MANY, stated=stated, stated_table=only("doubling"))
    lines = explain(findings)
    share = math.log(0.00365536 / 0.00296608) / math.log(0.00365536 / 0.00296608 * 0.00886432 / 0.00562144)
    assert lines[0] == f"algorithm by size: doubling up to {round(2**16 * 4**share):,} bytes; ring above"
    assert "backward: 200.0 ms, its first gradient after 10.0 ms; 20 gradients, 4.0 MB" in lines
    stated_words = "doubling at any size, threshold_bytes 10000000, buffer_bytes 10000000 = 1 buffers"
    assert f"   121.0 ms  as the config states: {stated_words}" in lines
    assert not any("nothing was measured" in line for line in lines)
    few = {size: at for size, at in TIMES.items() if size < 10**6}
    lines = explain(choose(links, few, BACKWARD, MANY, stated=stated, stated_table=only("doubling")))
    assert any("above 262,144 bytes nothing was measured" in line for line in lines)
    assert explain_links(links) == "messages: inside a node 2 us and 10 Gbit/s each way"
    assert explain_links(MeasuredLinks(None, None)) == "messages: none between these ranks"


def test_table_of_times() -> None:
    names = ["ring", "sharded", "native"]
    head, line = times_head(names), times_line(4096, {"ring": exact(0.002), "native": exact(0.0015)}, names)
    assert line.split() == ["4096", "2.000", "-", "1.500*", "n", "=", "2"]
    assert head.index("ring") + len("ring") == line.index("2.000") + len("2.000 ")


# --- the command ---

SMALL = ["--config", "quickstart", "--batch.microbatch_size", "4", "--batch.bn_span", "4", "--data.image_size", "16"]


@pytest.mark.slow
def test_tune_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tuned.json"
    assert main(["comm", "tune", *SMALL, "--budget-seconds", "3", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    for text in (
        "messages: none between these ranks",
        "all is measured",
        "native",
        "algorithm by size: ",
        "backward: ",
        "fusion plan: ",
        "chosen: ",
        "runs with another table, or none, end with other bits, within rounding, but for run.reproducible",
    ):
        assert text in out
    tuned = read_tuned(path)
    assert (tuned.model, tuned.cluster.world_size, tuned.cluster.backend) == ("resnet9", 1, "single")
    assert tuned.command.startswith("bigbatch comm tune --config quickstart")
    assert {t.name for t in tuned.tensors} == set(tuned.evidence["ready_seconds"])
    ready = [tuned.evidence["ready_seconds"][t.name] for t in tuned.tensors]
    assert ready == sorted(ready)
    assert max(ready) <= tuned.evidence["backward_seconds"]
    assert set(tuned.table.algorithms) <= set(tuned.evidence["all_reduce_seconds"]["1024"])
    assert f"--comm.algorithm hybrid --comm.table {path}" in out
    assert main(["comm", "bench", "--max-bytes", "1K", "--algorithms", "hybrid", "--table", str(path)]) == 0
    write_tuned(dataclasses.replace(tuned, cluster=OTHER_CLUSTER), path)
    assert main(["comm", "bench", "--table", str(path)]) == 1
    assert re.search(naming(path, "backend tcp there", "single here"), capsys.readouterr().err)


@pytest.mark.parametrize("name", ["resnet18", "resnet152", "alexnet_bn"])
def test_model_by_name_brings_the_options_that_it_has(name: str) -> None:
    arguments = tune_comm._parser().parse_args(["--model", name])
    assert load_config(tune_comm._config_argv(arguments, [])).model.name == name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], ("--config is missing",)),
        (
            ["--config", "quickstart", "--model", "resnet50"],
            ("--model resnet50 ", "--config quickstart "),
        ),
        (["--model", "resnet51"], ("model.name=resnet51 ", "resnet50")),
        (["--config", "quickstart", "--budget-seconds", "0"], ("--budget-seconds 0 ",)),
        (["--config", "quickstart", "--best", "0"], ("--best 0 ",)),
        (["--config", "quickstart", "--comm.bufer_bytes", "1"], ("comm.bufer_bytes", "comm.buffer_bytes")),
        ([*SMALL, "--budget-seconds", "1", "--output", "/proc/no/a.json"], ("/proc/no: ", "--output")),
    ],
)
def test_tune_refuses_impossible_arguments(
    options: list[str], named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["comm", "tune", *options]) == 1
    err = capsys.readouterr().err
    assert re.search(naming(*named), err)
    assert len(err.splitlines()) == 1
