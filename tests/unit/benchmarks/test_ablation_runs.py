"""The runs of the ablations: each is done once, may diverge, and an interrupted or failed one ends all."""

import math
import os
import signal
import subprocess
import sys

import pytest
import torch
from benchmark_process import from_checkout, run_benchmark
from fake_ablations import TINY, FakeBigbatch

from benchmarks.largebatch import ablation_results, ablations
from benchmarks.largebatch.ablation_cases import cases
from bigbatch.errors import ConfigError, TrainingDiverged
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.step.divergence import require_finite
from bigbatch.trainer.step.loss_scale import LossScale, Scaling


@pytest.mark.long
def test_run_all_repeats_nothing_finished(tmp_path, monkeypatch):
    fake = FakeBigbatch()
    monkeypatch.setattr(ablations, "run_child", fake)
    ablations.run_all(TINY, tmp_path)
    num_runs = 2 * len(cases(TINY))
    assert [fake.commands.count(name) for name in ("tune", "train")] == [3, num_runs]
    ablations.run_all(TINY, tmp_path)
    assert len(fake.commands) == 3 + num_runs
    (tmp_path / "runs/lars_128/seed1/summary.json").unlink()
    ablations.run_all(TINY, tmp_path)
    assert fake.commands[3 + num_runs :] == ["train"]
    results = ablation_results.collect(TINY, tmp_path)
    assert results["cases"]["lars 128"]["top1_percent"]["mean"] == pytest.approx(50.5)
    run = results["cases"]["lars 128"]["runs"][1]
    assert (run["seed"], run["base_lr"], run["top1"]) == (1, 0.25, 0.51)
    assert run["loss_curve"] == {"epoch": [0.5], "loss": [2.0]}
    space, wide = "schedule.base_lr=log:0.03:3.0", "schedule.base_lr=log:1.0:100.0"
    assert results["tuning"] == {
        "trials": 5,
        "epochs": 2,
        "studies": {
            "lars-128": {"space": wide, "base_lr": 0.25, "is_edge": True},
            "nesterov-128": {"space": space, "base_lr": 0.25, "is_edge": False},
            "sgd-128": {"space": space, "base_lr": 0.25, "is_edge": False},
        },
    }


def diverged_in_fp32():
    require_finite(math.nan, first_step=3, finite_steps=1, gather_text=lambda text: [text])


def diverged_in_fp16():
    """Half LARS must be allowed to end so."""
    scale = LossScale(Scaling(initial=1024.0, growth_steps=2000), device=torch.device("cpu"))
    while True:
        scale.judge_(torch.tensor(math.inf), failed=torch.tensor(False))
        scale.require_progress(1000, is_last=False)


def error_of(function):
    with pytest.raises(TrainingDiverged) as caught:
        function()
    return f"bigbatch: {caught.value}\n"


@pytest.mark.long
@pytest.mark.parametrize("function", [diverged_in_fp32, diverged_in_fp16])
def test_run_that_diverged_is_a_result(function, tmp_path, monkeypatch):
    message = error_of(function)
    fake = FakeBigbatch(train_ends=1, message=message)
    monkeypatch.setattr(ablations, "run_child", fake)
    ablations.run_all(TINY, tmp_path)
    assert (tmp_path / "runs/sgd_128/seed0/diverged.txt").read_text() == message
    results = ablation_results.collect(TINY, tmp_path)
    assert results["cases"]["sgd 128"]["diverged"] == 2
    table = ablation_results.markdown(results, title="x")
    assert "| sgd 128 | 128 | 5 | 0.25 | - | - | - | - | 0 of 2 ended |" in table
    assert "- batch 128: lars (0 of 2 ended) minus sgd (0 of 2 ended): - +- -" in table


def config_error():
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", "cifar10", "--schedule.end_lr", "1.0"])
    assert "schedule.base_lr" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("code", "words"), [(130, "goes on from here"), (1, "failed: ")])
def test_run_interrupted_or_failed_ends_all(code, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablations, "run_child", FakeBigbatch(train_ends=code, message=f"bigbatch: {config_error()}"))
    with pytest.raises(SystemExit) as ended:
        ablations.run_all(TINY, tmp_path)
    assert ended.value.code == code
    assert words in capsys.readouterr().out
    assert not list(tmp_path.rglob("diverged.txt"))


PARENT = """
import sys
from benchmarks.largebatch import ablations
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
ablations.stop_unless_done(ablations.run_child(command).returncode, command)
print("the next run")
"""
SLOW_TO_SAVE = """
import pathlib, signal, sys, time
def save(number, frame):
    time.sleep(1)
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGINT, save)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_ctrl_c_waits_until_the_child_has_saved(tmp_path):
    """The whole process group gets SIGINT, as from a terminal; nothing else is started."""
    command = [sys.executable, "-c", PARENT, SLOW_TO_SAVE, str(tmp_path / "checkpoint")]
    streams = {"stdout": subprocess.PIPE, "text": True, "env": from_checkout()}
    process = subprocess.Popen(command, start_new_session=True, **streams)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=200) == 130
    assert (tmp_path / "checkpoint").read_text() == "saved"
    assert process.stdout.read() == "interrupted; the same command goes on from here\n"


@pytest.mark.long
def test_ablations_without_images_are_skipped(tmp_path):
    options = ("--dataset", "imagenette", "--form", "short", "--data", "none")
    done = run_benchmark("largebatch.ablations", *options, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: none/train is not there; bigbatch data prepare makes it")
    assert not list(tmp_path.iterdir())
