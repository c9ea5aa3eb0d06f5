"""Losses of a node that a job rehearses: how they are stated, and when they happen."""

import argparse
import json
import re
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch.errors import JobRefused
from bigbatch.tools.emulate import losses
from bigbatch.tools.emulate.losses import FaultInjector, Loss, parse_losses
from bigbatch.tools.emulate.plan import ClusterPlan
from bigbatch.tools.emulate.state import EmulatedCluster
from bigbatch.tools.emulate.subcommands import main

CLUSTER = EmulatedCluster(ClusterPlan("box", (1, 1), None), 7, 0, "")


def stated(**options: list[str]) -> argparse.Namespace:
    return argparse.Namespace(**{"kill": None, "stop": None, "cut": None, **options})


def test_losses_come_in_the_order_of_their_steps() -> None:
    found = parse_losses(stated(kill=["n1@step=50"], cut=["n0@step=7", "n3@step=60"]), num_nodes=4)
    assert found == (Loss("cut", 0, 7), Loss("kill", 1, 50), Loss("cut", 3, 60))
    assert str(found[1]) == "--kill n1@step=50"
    assert parse_losses(stated(), num_nodes=4) == ()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--stop", "n1@step=5"), ("--stop n1@step=5", "train")),
        (("--kill", "n1"), ("--kill 'n1'", "--kill n1@step=50")),
        (("--kill", "n1@step=0"), ("--kill 'n1@step=0'", "--kill n1@step=50")),
        (("--kill", "n1@5"), ("--kill 'n1@5'", "--kill n1@step=50")),
        (("--kill", "n9@step=5"), ("--kill 'n9'", "n0 to n1")),
        (("--link", "fast"), ("--link 'fast'",)),
        (("--name", "a/b"), ("--name 'a/b'",)),
    ],
)
def test_wrong_options_of_emulate_end_with_the_code_of_a_usage_error(
    words: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path
) -> None:
    run = ["run", "--nodes", "2", "--dry-run", "--launcher", "plain", *words, "--", "doctor", "--help"]
    with pytest.raises(JobRefused, match=naming(*parts)) as caught:
        main(run, environ={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert caught.value.exit_code == 2


def test_losses_happen_once_at_the_first_new_report_of_their_step_or_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(losses, "_signal_node", lambda *words: done.append(words))
    monkeypatch.setattr(losses, "run_inside", lambda cluster, argv, **how: done.append((argv[4], how["node"])))
    metrics = tmp_path / "metrics.jsonl"

    def write(*steps: int, mode: str = "a", kind: str = "train") -> None:
        with metrics.open(mode) as file:
            file.writelines(json.dumps({"kind": kind, "step": step}) + "\n" for step in steps)

    write(90)  # of an earlier start
    rehearsal = FaultInjector(
        (Loss("cut", 0, 3), Loss("stop", 1, 5), Loss("kill", 1, 80)), metrics=metrics, cluster=CLUSTER, environ={}
    )
    rehearsal()
    write(2)
    write(50, kind="eval")
    rehearsal()
    assert done == []
    write(4)
    rehearsal()
    assert done == [("eth0", 0), ("p0", None)]
    with metrics.open("a") as file:
        file.write('{"kind": "train", "ste')  # more follows
    rehearsal()
    write(2, 3, mode="w")  # the job has started again, from step 2
    rehearsal()
    assert len(done) == 2
    write(4, 6)
    rehearsal()
    assert done[2:] == [(7, 1, losses.SIGNALS["stop"])]
    assert rehearsal.left == [Loss("kill", 1, 80)]
    assert re.search(naming("--stop n1@step=5", "n1 was stopped", "step 6"), capfd.readouterr().err)


def test_losses_survive_a_shorter_file_that_has_grown_past_the_last_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(losses, "_signal_node", lambda *words: done.append(words))
    metrics = tmp_path / "metrics.jsonl"
    line = '{"kind": "train", "step": %d}\n'
    metrics.write_text("".join(line % step for step in (1, 2, 3)))
    rehearsal = FaultInjector((Loss("kill", 1, 9),), metrics=metrics, cluster=CLUSTER, environ={})
    # a resumed run has kept one report and written others: the place of the last look is within a line
    metrics.write_text(line % 1 + '{"kind": "start", "step": 1, "job": {"world_size": 2}}\n' + line % 2 + line % 3)
    rehearsal()
    with metrics.open("a") as file:
        file.write("damaged\n" + line % 8)
    rehearsal()
    assert done == []
    with metrics.open("a") as file:
        file.write(line % 9)
    rehearsal()
    assert done == [(7, 1, losses.SIGNALS["kill"])]


@pytest.mark.parametrize(
    "line", ["5", "[]", '{"a": 1}', '{"kind": "train"}', '{"kind": "train", "step": "9"}', "\\xff"]
)
def test_losses_survive_a_damaged_report(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(losses, "_signal_node", lambda *words: done.append(words))
    metrics = tmp_path / "metrics.jsonl"
    rehearsal = FaultInjector((Loss("kill", 1, 9),), metrics=metrics, cluster=CLUSTER, environ={})
    rehearsal()
    metrics.write_text(line + "\n")
    rehearsal()
    assert done == []
    with metrics.open("a") as file:
        file.write('{"kind": "train", "step": 9}\n')
    rehearsal()
    assert done == [(7, 1, losses.SIGNALS["kill"])]
