"""The benchmarks of LARS: every case is exact, peers agree where definitions meet, a step's figures follow by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmark_process import run_benchmark

from benchmarks.largebatch import exactness, lars_step

# --- exactness ---


def small(case):
    return replace(case, shape=(30, 7) if case.shape == (1024, 520) else case.shape)


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("form", exactness.MOMENTUM_FORMS)
@pytest.mark.parametrize("case", exactness.CASES, ids=lambda case: case.name)
def test_exactness_of_every_case(case, form, nesterov):
    settings = {"form": form, "nesterov": nesterov, "dtype": torch.float64, "steps": 50}
    assert exactness.deviation(exactness.our_maker(form), small(case), **settings) < 1e-12


def test_exactness_of_a_wrong_optimizer_deviates():
    case = exactness.CASES[0]
    settings = {"nesterov": False, "dtype": torch.float64, "steps": 20}
    assert exactness.deviation(exactness.our_maker("lr_inside"), case, form="lr_outside", **settings) > 1e-3
    assert exactness.relative(torch.tensor([1.0, float("nan")]), np.array([1.0, 1.0])) == float("inf")


# --- the step ---


@pytest.mark.long
@pytest.mark.weekly
def test_lars_step_runs_and_names_who_is_left_out(tmp_path):
    options = ("--models", "resnet18", "--repeats", 1, "--threads", 1, "--bandwidth-mb", 1)
    done = run_benchmark("largebatch.lars_step", *options, "--out", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    model = found["models"]["resnet18"]
    assert model["parameters"] == 11_689_512  # torchvision's documented count
    assert model["times_bigbatch"]["bigbatch"]["median"] == 1
    assert {*model["milliseconds"], *model["left_out"]} == set(lars_step.MAKERS)
    assert all(text.startswith("not installed") for text in model["left_out"].values())
    assert found["conditions"]["cpu_threads"] == 1
