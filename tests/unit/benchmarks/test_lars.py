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


PEERS = {
    # peer: the cases in which its definition is another
    "timm, eps 0": {"excluded with decay"},
    "timm, eps 0, foreach": {"excluded with decay"},
    "torch-optimizer, eps 0": {"adapted without decay", "excluded with decay", "gradient is zero"},
}


@pytest.mark.long
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_exactness_of_peers_agrees_where_definitions_meet(peer, nesterov):
    found, left_out = exactness.available_peers(None)
    if peer in left_out:
        pytest.skip(left_out[peer])
    settings = {"form": "lr_outside", "nesterov": nesterov, "dtype": torch.float64, "steps": 200}
    values = {case.name: exactness.deviation(found[peer], small(case), **settings) for case in exactness.CASES}
    assert {name for name, value in values.items() if value > 1e-12} == PEERS[peer]


def test_exactness_of_a_wrong_optimizer_deviates():
    case = exactness.CASES[0]
    settings = {"nesterov": False, "dtype": torch.float64, "steps": 20}
    assert exactness.deviation(exactness.our_maker("lr_inside"), case, form="lr_outside", **settings) > 1e-3
    assert exactness.relative(torch.tensor([1.0, float("nan")]), np.array([1.0, 1.0])) == float("inf")


def test_exactness_loads_another_implementation_by_its_path(tmp_path):
    path = tmp_path / "lars.py"
    path.write_text("import torch\n\ndef Lars(groups, **settings):\n    return torch.optim.SGD(groups, lr=1.0)\n")
    found, left_out = exactness.available_peers(path)
    assert "NUS-HPC-AI-Lab" in found
    values = exactness.peer_deviations(found["NUS-HPC-AI-Lab"], steps=1)
    assert values["gradient is zero"] > 0  # SGD without decay stays; it has no Nesterov, and says so
    assert exactness.available_peers(None)[1]["NUS-HPC-AI-Lab"] == "--nus was not given"
    assert set(left_out) <= {"torch-optimizer, eps 0", "torch-optimizer as it comes"}


# --- the step ---


def test_shares_of_the_bandwidth_by_hand():
    seconds = {"bigbatch": [2.0], "timm": [4.0], "sgd_fused": [1.0], "copy": [1.0], "triad": [1.0]}
    found = lars_step.summarise(seconds, num_parameters=10**9, num_bandwidth=10**9)
    assert found["bandwidth_gb_per_s"]["copy"]["median"] == 8
    assert found["bandwidth_gb_per_s"]["triad"]["median"] == 12
    assert found["times_bigbatch"]["timm"]["median"] == 2
    assert found["share_of_bandwidth"]["timm"]["median"] == pytest.approx(28 / 4 / 12)
    assert set(found["share_of_bandwidth"]) == {"bigbatch", "timm"}


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
