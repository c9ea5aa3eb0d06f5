"""`bigbatch comm bench` and `tune` as real jobs of several ranks, on one host that plays several nodes."""

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import exit_codes, places, start_rank
from test_parallel import fork_job

from bigbatch.comm.algorithms.hybrid import HybridTable
from bigbatch.comm.gradients.fusion import TensorSpec
from bigbatch.comm.tuning.tuned import read_tuned
from bigbatch.trainer.datasets.generated import write_dataset

pytestmark = pytest.mark.long


SMALL_MODEL = ("--config", "quickstart", "--batch.microbatch_size", "4", "--batch.bn_span", "4")
DDP_SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
model = DistributedDataParallel(module, bucket_cap_mb=1e-4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
try:
    for step in range(int(sys.argv[1])):
        inputs = torch.randn(4, 8, generator=generator)
        optimizer.zero_grad()
        own = torch.autograd.grad(module(inputs).square().mean(), list(module.parameters()))
        model(inputs).square().mean().backward()
        for mine, parameter in zip(own, module.parameters()):
            dist.all_reduce(mine)
            torch.testing.assert_close(parameter.grad, mine / dist.get_world_size())
        optimizer.step()
        if step % 7 == 0:
            model.eval()
            model(inputs)
            model.train()
finally:
    print(f"rank {dist.get_rank()}: {step + 1} steps had the average")
"""
"""Compares the gradients of each step with the average of all ranks' own."""
ONE_SIZE = ("--min-bytes", "40000", "--max-bytes", "40000", "--repetitions", "2")


def play_nodes(nodes: Sequence[str], *command: str, expect: int = 0) -> str:
    """One process per entry of nodes, which says whose rank it plays; all that was said, after this exit code."""
    environs = []
    for rank, (node, place) in enumerate(zip(nodes, places(len(nodes)), strict=True)):
        local = {"LOCAL_RANK": str(nodes[:rank].count(node)), "LOCAL_WORLD_SIZE": str(nodes.count(node))}
        environs.append({**place, **local, "BIGBATCH_HOST": node})
    code, text = fork_job("forked_ranks:bigbatch", command, environs, timeout_seconds=250)
    assert code == expect, text
    return text


def test_tune_of_a_ddp_script_trains_it_rightly_with_every_candidate(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DDP_SCRIPT)
    command = ("comm", "tune", "--ddp", str(script), "--steps", "1", "--", "5000")
    text = play_nodes("aa", *command)
    steps = [int(count) for count in re.findall(r"rank \d: (\d+) steps had the average", text)]
    assert len(steps) == 2
    assert 50 < steps[0] == steps[1] < 5000, "ended once all is measured"
    assert re.search(r"ms a step, \+-.*with our hook; n = 5 turns", text)
    assert len(re.findall(r"^(?:buckets|hook): ", text, re.M)) == 2


def records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Conditions and rows of a sweep."""
    conditions, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    return conditions, rows


@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        ("tcp", ["--dtype", "float32", "--wire-dtype", "float16"]),
        ("gloo", ["--dtype", "float32", "--wire-dtype", "bfloat16"]),
    ],
)
def test_bench_finds_every_algorithm_of_every_backend_right(backend: str, precision: list[str], tmp_path: Path) -> None:
    """Whole numbers, exact in memory and on the wire, so that one wrong bit is one wrong value."""
    output = tmp_path / "a.jsonl"
    command = ("comm", "bench", *ONE_SIZE, *precision, "--backend", backend, "--output", str(output))
    text = play_nodes("aaa", *command)
    assert "# wrong values: 0" in text
    assert "no link limits them" in text
    conditions, rows = records(output)
    assert conditions["backend"] == backend
    assert conditions["groups"] == [[0, 1, 2]]
    assert {r["algorithm"] for r in rows} >= {"native", "ring", "hierarchical", "sharded"}
    for r in rows:
        assert (r["num_wrong"], r["limit_share"], len(r["repetitions_us"])) == (0, None, 2)
        assert r["busbw_gb_per_s"] == pytest.approx(r["algbw_gb_per_s"] * 4 / 3, rel=1e-12)


def test_bench_share_of_a_given_link(tmp_path: Path) -> None:
    """2 nodes: the least time is 2 * 1/2 * bytes / link, here given as 8 Gbit/s = 1e9 bytes/s; fp16 wire: half.

    Doubling sends unrounded partial sums, in fp32.
    """
    output = tmp_path / "a.jsonl"
    options = [*ONE_SIZE, "--interface", "lo", "--link-gbit", "8", "--wire-dtype", "float16", "--output", str(output)]
    text = play_nodes(("a", "a", "b", "b"), "comm", "bench", *options)
    assert "2(m-1)/m * size * 0.5 (doubling 1) / link, with m = 2 nodes and 8 Gbit/s per link, as given" in text
    _, rows = records(output)
    for r in rows:
        num_bytes = 40_000 if r["algorithm"] == "doubling" else 20_000
        assert r["limit_share"] == pytest.approx(num_bytes / 1e9 / (r["time_us"] / 1e6), rel=1e-9)


def test_bench_share_of_a_measured_link(tmp_path: Path) -> None:
    """Uneven nodes, scattered ranks."""
    output = tmp_path / "a.jsonl"
    options = [*ONE_SIZE, "--interface", "lo", "--output", str(output)]
    text = play_nodes(("a", "b", "a"), "comm", "bench", *options)
    assert "Gbit/s per link, measured: the best of messages of 8M" in text
    conditions, rows = records(output)
    assert conditions["groups"] == [[0, 2], [1]]
    bytes_per_second = conditions["limit"]["bytes_per_second"]
    assert 1e7 < bytes_per_second < 1e12  # loopback
    for r in rows:
        assert r["num_wrong"] == 0
        assert r["limit_share"] == pytest.approx(40_000 / bytes_per_second / (r["time_us"] / 1e6), rel=1e-9)


def test_bench_finds_ranks_with_other_arguments(tmp_path: Path) -> None:
    log, command = tmp_path / "log", ("comm", "bench", "--min-bytes", "1K", "--max-bytes")
    ranks = [
        start_rank("forked_ranks:bigbatch", (*command, size), environ=place, stdout=log, stderr=log)
        for size, place in zip(("1K", "2K"), places(2), strict=True)
    ]
    assert exit_codes(ranks, timeout_seconds=250) == [1, 1]
    assert re.search(r"rank 1 and rank 0 .*command line.*\b2K\b.*\b1K\b", log.read_text()), log.read_text()


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_verify_on_uneven_nodes_of_three_ranks(wire: str | None, tmp_path: Path) -> None:
    output = tmp_path / "v.jsonl"
    options = ["--min-bytes", "40000", "--max-bytes", "40000", "--interface", "lo", "--output", str(output)]
    options += ["--wire-dtype", wire] if wire else []
    text = play_nodes(("a", "b", "a"), "comm", "bench", "--verify", *options)
    assert "every sum repeats its own bits" in text
    conditions, rows = records(output)
    end = rows.pop()
    assert (conditions["groups"], end["kind"], end["failed"]) == ([[0, 2], [1]], "verdict", False)
    assert {row["algorithm"] for row in rows} == {"native", "ring", "hierarchical", "sharded", "doubling"}
    for row in rows:
        assert (row["num_repeated"], row["repetitions"], row["ranks_agree"], row["findings"]) == (5, 5, True, [])
        assert 0 < row["bound_share"] <= 1
        assert (row["largest_error"] > 2**-20) == (wire is not None)  # bf16 has 16 bits less


def test_tune_and_use_what_it_found(tmp_path: Path) -> None:
    """Two nodes of two ranks: measured, stored, used by bench as hybrid, and refused by another cluster."""
    path, nodes = tmp_path / "tuned.json", ("a", "a", "b", "b")
    options = [*SMALL_MODEL, "--comm.interface", "lo", "--budget-seconds", "20", "--force", "--output", str(path)]
    text = play_nodes(nodes, "comm", "tune", *options)
    for expected in (
        "inside a node",
        "between nodes",
        "algorithm by size: ",
        "chosen: ",
        f"stored in {path}",
    ):
        assert expected in text
    tuned = read_tuned(path)
    assert (tuned.cluster.world_size, tuned.cluster.group_sizes, tuned.cluster.placement) == (4, (2, 2), "block")
    fastest = HybridTable.from_rows(tuned.evidence["fastest_table"])
    check_promises(tuned.evidence, fastest.choose, tuned.tensors)

    bench = ["comm", "bench", *ONE_SIZE, "--interface", "lo", "--table", str(path)]
    text = play_nodes(nodes, *bench, "--algorithms", "hybrid,native")
    assert "hybrid" in text
    text = play_nodes(("a", "b", "a", "b"), *bench, expect=1)
    assert re.search(rf"{path} .*placement block there, scattered here.*bigbatch comm tune", text), text


def check_promises(evidence: dict[str, Any], choose: Any, tensors: tuple[TensorSpec, ...]) -> None:
    """The default, or within 5% of the best median everywhere; whole steps in time; gradients in their order."""
    medians = {
        int(size): {name: statistics.median(seconds) for name, seconds in at_size.items()}
        for size, at_size in evidence["all_reduce_seconds"].items()
    }
    assert medians
    for size, at_size in medians.items():
        assert choose(size) == "hierarchical" or at_size[choose(size)] <= 1.05 * (1 + 1e-9) * min(at_size.values())
    for step in evidence["whole_steps"]:  # a busy machine has no time for them
        assert min(step["seconds"]) > 0
    ready = [evidence["ready_seconds"][tensor.name] for tensor in tensors]
    assert ready == sorted(ready)


def test_tune_then_train_with_it_and_evaluate_anywhere(tmp_path: Path) -> None:
    """The options that tune prints, then a run folder that another number of ranks evaluates, without the table."""
    write_dataset(tmp_path / "shapes", train_per_class=32, val_per_class=7, side_pixels=(36, 48))
    table, run = tmp_path / "tuned.json", tmp_path / "run"
    tiny = ("--config", "quickstart", "--model.options.width", "4", "--batch.global_batch_size", "64")
    tiny += ("--batch.microbatch_size", "16", "--batch.bn_span", "16")
    tiny += ("--schedule.warmup_epochs", "1", "--data.root", str(tmp_path / "shapes"), "--data.loader", "torchvision")
    text = play_nodes("aa", "comm", "tune", *tiny, "--budget-seconds", "4", "--force", "--output", str(table))
    options = re.search(r"to train with it: (.*)", text)
    assert options, text
    train = ("train", *tiny, "--run.epochs", "1", "--run.directory", str(run), *options[1].split())
    text = play_nodes("aa", *train)
    sizes = read_tuned(table).sizes
    assert json.loads((run / "summary.json").read_text())["algorithm"] == "hybrid"
    buffers = [line for line in text.splitlines() if line.startswith("buffer ")]
    assert buffers, text
    assert len(buffers) == 1 or sizes.buffer_bytes < 2_000_000
    text = play_nodes("a", *train, "--run.epochs", "2", expect=1)
    assert re.search(rf"{table} .*backend tcp there, single here.*bigbatch comm tune", text), text
    table.unlink()
    text = play_nodes("a", "evaluate", str(run))
    assert "70 images" in text


def test_train_counts_survive_a_narrow_wire(tmp_path: Path) -> None:
    """bfloat16 knows only every fourth number beyond 512: evaluation and reports must not travel as gradients do."""
    write_dataset(tmp_path / "shapes", train_per_class=8, val_per_class=53, side_pixels=(36, 48))
    train = ("train", "--config", "quickstart", "--model.options.width", "4", "--batch.global_batch_size", "32")
    train += ("--batch.microbatch_size", "16", "--batch.bn_span", "16", "--schedule.warmup_epochs", "1")
    train += ("--run.epochs", "1", "--data.loader", "torchvision")
    train += ("--data.root", str(tmp_path / "shapes"), "--run.directory", str(tmp_path / "run"))
    text = play_nodes("aa", *train, "--comm.wire_dtype", "bfloat16", "--comm.predivide", "2")
    assert "(530 images" in text
