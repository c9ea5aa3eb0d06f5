"""Classes and functions of a script outside of the project in place of import paths, and its model loaded again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_training import TINY

from bigbatch.errors import ConfigError
from bigbatch.trainer.in_python import train

SCRIPT = '''
import json, sys
import torch
import bigbatch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, *, num_classes):
        super().__init__()
        self.layer = nn.Linear(3, num_classes)

    def forward(self, images_BCHW):
        return self.layer(images_BCHW.mean((2, 3)))

class Steps(torch.optim.SGD):
    """A class of its own."""

def squares(logits_BK, targets):
    return (logits_BK.softmax(1) - F.one_hot(targets, logits_BK.shape[1])).square().sum(1)

def constant(*, base_lr, warmup_steps, total_steps):
    return lambda step: base_lr

if __name__ == "__main__":
    tiny, run = json.loads(sys.argv[1]), sys.argv[2]
    losses = {"optimizer.loss": squares, "run.metrics": {"gap": squares, "half": {"name": squares}}}
    named = {"model.name": Net, "optimizer.name": Steps, "optimizer.momentum": None, "schedule.name": constant}
    bigbatch.train("quickstart", tiny | named | losses | {"run.directory": run}, quiet=True)
    state = torch.random.get_rng_state()
    model = bigbatch.load_model(run, trust_code=True)
    assert torch.equal(state, torch.random.get_rng_state())
    assert type(model) is Net and not model.training and model.class_names is None
    print(len(model(torch.zeros(2, 3, 8, 8))))
    try:
        bigbatch.load_model(run)
    except bigbatch.errors.ConfigError as error:
        print(error)
'''


@pytest.mark.slow
def test_classes_of_a_script_stand_for_their_import_paths(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    tiny = {key: value for key, value in TINY.items() if not key.startswith("model.")}
    once = {"run.epochs": 1, "run.loggers": [], "run.divergence_steps": None, "schedule.warmup_epochs": 0}
    words = ["script.py", json.dumps(tiny | once | {"optimizer.label_smoothing": 0}), str(tmp_path / "run")]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    shown, refused = done.stdout.splitlines()
    assert shown == "2"
    assert "model.name: __main__.Net" in refused
    assert "schedule.name" not in refused, "a model that is loaded needs no schedule"
    text = (tmp_path / "run/config.yaml").read_text()
    assert all(f"name: __main__.{name}" in text for name in ("Net", "Steps", "constant"))


@pytest.mark.parametrize("value", [lambda logits, targets: logits, type("Local", (), {})])
def test_class_without_an_import_path_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.loss=<.* it has no import path: define it at the top level"):
        train("quickstart", {"optimizer.loss": value, "run.directory": tmp_path}, quiet=True)
