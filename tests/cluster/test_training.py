"""A real training job across emulated nodes, from start to end, and the bytes that it sends."""

import json
from pathlib import Path

from bigbatch.trainer.datasets.generated import write_dataset
from tests.cluster.conftest import Emulate

TRAIN = (
    *("train", "--config", "quickstart", "--data.loader", "torchvision", "--run.epochs", "2"),
    *("--batch.global_batch_size", "128", "--batch.microbatch_size", "32", "--batch.bn_span", "16"),
    *("--schedule.warmup_epochs", "1", "--schedule.base_lr", "1", "--comm.timeline_steps", "[1, 2]"),
    *("--comm.algorithm", "hierarchical"),
)


def test_training_job_crosses_the_links_once(tmp_path: Path, emulate: Emulate) -> None:
    write_dataset(tmp_path / "shapes", train_per_class=32, val_per_class=4)
    run, counters = tmp_path / "run", tmp_path / "counters.json"
    done = emulate(
        *("run", "--name", "train", "--nodes", "2", "--ranks-per-node", "2", "--link", "1gbit"),
        *("--launcher", "mpirun", "--place", "cyclic", "--counters", str(counters), "--", *TRAIN),
        *("--data.root", str(tmp_path / "shapes"), "--run.directory", str(run)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["world_size"], summary["backend"], summary["algorithm"]) == (4, "tcp", "hierarchical")
    trace = json.loads((run / "timeline.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert names == {f"rank {r} on n{r % 2}" for r in range(4)}
    sums = [event for event in trace if event["ph"] == "X" and event["name"].startswith("all-reduce of buffer")]
    assert {event["args"]["algorithm"] for event in sums} == {"hierarchical"}
    gradient_bytes = sum(event["args"]["bytes"] for event in sums if event["pid"] == 0) / 2  # two steps recorded
    sent = {node["host"]: node["sent_bytes"] for node in json.loads(counters.read_text())["nodes"]}
    assert set(sent) == {"n0", "n1"}
    for node, num_bytes in sent.items():  # 2 (m - 1) / m = 1 for two nodes; the rest is statistics, agreement, headers
        assert summary["steps"] * gradient_bytes < num_bytes < 1.35 * summary["steps"] * gradient_bytes, (node, sent)
