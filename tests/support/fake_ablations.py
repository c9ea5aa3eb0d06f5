"""A tiny form of the ablations and a stand-in for the processes that they start, for the tests of ablations."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import yaml

from benchmarks.largebatch.ablation_cases import FORMS
from bigbatch.trainer.config.file import load_config

TINY = replace(FORMS["cifar10", "short"], batches=(128,), seeds=(0, 1))


class FakeBigbatch:
    """Stands in for ablations.run_child: searches find 0.25, runs leave a summary."""

    def __init__(self, *, train_ends=0, message=""):
        self.commands, self.train_ends, self.message = [], train_ends, message

    def __call__(self, command, **streams):
        self.commands.append(command[3])
        given = dict(zip(command[-2::-2], command[::-2], strict=False))
        if command[3] == "tune":
            path = Path(given["--study"]) / "best.yaml"
            path.parent.mkdir(parents=True)
            path.write_text(yaml.safe_dump({"schedule": {"base_lr": 0.25}}))
            return SimpleNamespace(returncode=0)
        config = load_config(["--config", given["--config"]])
        assert config.schedule.base_lr == 0.25
        if not self.train_ends:
            summary = {"top1": 0.5 + 0.01 * config.run.seed, "seconds": 7.0}
            Path(config.run.directory, "summary.json").write_text(json.dumps(summary))
            record = {"kind": "train", "step": 1, "epoch": 0.5, "loss": 2.0}
            Path(config.run.directory, "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return SimpleNamespace(returncode=self.train_ends, stderr=self.message)
