"""The doctor on a GPU: syncs of its own tensors, and an examination of generated tensors."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.tools.doctor.budget import Budget
from bigbatch.tools.doctor.examine import TENSORS, Examination, ExaminationResults
from bigbatch.tools.doctor.exchange import Probes
from bigbatch.tools.doctor.probe import _Probe
from bigbatch.tools.doctor.profile import FindSyncs
from bigbatch.trainer.build.job import join_job
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config, try_values

pytestmark = pytest.mark.gpu
OPTIONS = {
    "data.loader": "synthetic",
    "data.num_synthetic_samples": 256,
    "data.image_size": 32,
    "batch.global_batch_size": 256,  # so that one other microbatch is tried
    "optimizer.precision": "fp16",
    "optimizer.loss_scale": 256.0,
    "optimizer.loss_scale_growth_steps": "null",
}


def test_syncs_of_device_tensors_are_found_and_those_of_the_host_are_not() -> None:
    device = torch.device("cuda")
    on_device, on_host = torch.ones(3, device=device), torch.ones(3)
    with FindSyncs(device) as syncs:
        on_host.sum().item()
        on_device.sum().item()
        on_device.cpu()
        on_device[on_device > 0].sum()
    assert sorted(found.partition(": ")[2].split()[0] for found in syncs.found) == ["copies", "counts", "reads"]


class InThisProcess:
    """A probe that carries out the doctor's orders here: each process of its own would first import torch."""

    def __init__(self, config: Config) -> None:
        self._communicator, tuned = join_job(config, ALONE)
        self._probe = _Probe(config, self._communicator, tuned)
        self.facts = self._probe.facts

    def ask(self, what: str, *, limit_seconds: float, **details: Any) -> Any:
        return json.loads(json.dumps(getattr(self._probe, what)(**details)))

    def close(self) -> None:
        self._probe.close()
        self._communicator.close()

    kill = close


def test_examination_tells_how_long_the_gpu_works() -> None:
    config = load_config(["--config", "quickstart", *(f"--{key}={value}" for key, value in OPTIONS.items())])
    findings = ExaminationResults()

    def start(values: Mapping[str, Any]) -> Any:
        changed = try_values(config, values, world_size=1)
        assert isinstance(changed, Config)
        return InThisProcess(changed)

    Examination(
        config=config,
        full_config=config,
        batches=TENSORS,
        seconds=0.1,
        turns=1,
        only=("microbatch",),
        budget=Budget(),
        probes=Probes(start, limit_seconds=lambda: 1.0),
        findings=findings,
        say=lambda text: None,
    ).run()
    assert 0 < findings.profile["busy_share"] <= 1
    assert findings.profile["syncs"] == {}
    assert findings.profile["operators"][0][1] > 0
    assert sum(findings.profile["phases"].values()) == pytest.approx(findings.profile["seconds"], rel=0.05)
    assert [row.failure for row in findings.rows] == [""]
    assert all(row.measured for row in findings.rows)
