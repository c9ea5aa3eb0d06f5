"""A run folder and its images move to another place: nothing else is needed to evaluate and to continue."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from error_texts import naming
from sample_images import encoded, smooth_image, write

from bigbatch.cli import main
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.input.listed import write_list

pytestmark = pytest.mark.long

RECIPE = """\
base: quickstart
run: {epochs: 2, loggers: [], checkpoint_every_steps: 2}
data: {root: pets.json, num_classes: 3, image_size: 16, loader: torchvision}
model: {options: {width: 4}}
batch: {global_batch_size: 8, microbatch_size: 8, bn_span: 8}
schedule: {base_lr: 0.5, warmup_epochs: 0.5}
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `there` with the run `there/moved` after two epochs and a half, and its images `there/elsewhere`."""
    here, there = tmp_path / "here", tmp_path / "there"
    images = {f"{'abc'[n % 3]}/{n}.jpg": encoded(smooth_image(n, 20, 20)) for n in range(30)}
    write(here / "pets", images)
    there.mkdir()
    monkeypatch.chdir(here)
    assert main(["init", "pets", "--workers", "1"]) == 0
    Path("pets.yaml").write_text(RECIPE)
    assert main(["train", "--config", "pets.yaml", "--quiet"]) == 0
    shutil.move(here / "runs/pets", there / "moved")
    shutil.move(here / "pets", there / "elsewhere")
    shutil.rmtree(here)
    monkeypatch.chdir(there)
    return there


def test_moved_run_evaluates_and_continues_with_the_same_bits(trained, capsys):
    summary = json.loads(Path("moved/summary.json").read_text())
    assert main(["evaluate", "moved"]) != 0
    assert re.search(naming("images.json", "is missing", "--data.root"), capsys.readouterr().err)
    assert main(["evaluate", "moved", "--data.root", "elsewhere", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["count"] == 6
    assert record["top1"] == summary["best_top1"]
    whole = last_weights(Path("moved"))
    cut = Path("cut")  # the same run, stopped in its second epoch
    shutil.copytree("moved", cut)
    newest = newest_checkpoint(cut)
    shutil.rmtree(newest)
    (cut / "summary.json").unlink()
    assert list_checkpoints(cut / "checkpoints")[-1].step < 6
    assert main(["train", "--config", "cut", "--data.root", "elsewhere", "--quiet"]) == 0
    assert not Path("runs").exists()
    assert list_checkpoints(cut / "checkpoints")[-1].path.name == newest.name
    for name, tensor in last_weights(cut).items():
        assert torch.equal(tensor, whole[name]), name
    # once it was trained there, the folder knows where its images are
    assert main(["evaluate", "cut", "--json"]) == 0
    assert load_config(["--config", "cut", "--data.root", "other.json"]).data.list is None


def test_moved_run_without_its_list_names_what_is_missing(trained, capsys):
    """Commands that read none of its images need none, nor the list that it was begun with."""
    Path("moved/images.json").unlink()
    launched = [
        "launch",
        "slurm",
        "--output",
        "job.sbatch",
        "--nodes=2",
        "--ranks-per-node=1",
        "--",
        "evaluate",
        "moved",
    ]
    assert main(launched) != 0
    assert "moved/images.json is missing" in capsys.readouterr().err
    training = ["launch", "slurm", "--dry-run", "--nodes=2", "--ranks-per-node=1", "--", "train", "--config=moved"]
    assert main(training) != 0
    told = capsys.readouterr().err
    assert "moved/images.json is missing" in told
    assert "pets.json" not in told, "another fault, and the advice to make another list"
    write_list(Path("another.json"), Path("elsewhere"), {"train": {"a": ["a/0.jpg"]}, "val": {"a": ["a/3.jpg"]}})
    assert main([*launched, "--data.root", "another.json"]) == 0
    tune = ("tune range --from 0.1 --to 1 --steps 100 --out new", "tune precision --steps 2 --out new")
    on_experiment = ("doctor", "preflight", "train --dry-run", *tune)
    for words in ("evaluate moved", "replay moved --step 1", *(f"{each} --config moved" for each in on_experiment)):
        assert main(words.split()) != 0
        missing = naming("moved/images.json is missing", "restore it", "--data.root")
        assert re.search(missing, capsys.readouterr().err), words
    assert main(["predict", "moved", "elsewhere/a/0.jpg"]) == 0
    assert main(["report", "moved"]) == 0
    assert main(["export", "moved", "model.pt2"]) == 0


def test_moved_run_never_trains_on_images_that_validated(trained, capsys):
    """A list of the same name, with one image of each split exchanged, is not that of the run."""
    shutil.rmtree(newest_checkpoint(Path("moved")))
    copy = Path("moved/images.json")
    record = copy.read_bytes()
    swapped = json.loads(record) | {"folder": "elsewhere"}
    train, val = swapped["train"]["a"], swapped["val"]["a"]
    train[0], val[0] = val[0], train[0]
    Path("pets.json").write_text(json.dumps(swapped))
    launched = "launch slurm --dry-run --nodes 2 --ranks-per-node 1 -- train --config moved"
    for verb in ("evaluate moved", "train --quiet --config moved", launched):
        assert main(verb.split()) != 0
        assert "--data.root moved/images.json" in capsys.readouterr().err
    assert main(["train", "--quiet", "--config", "moved", "--data.root", "pets.json"]) != 0
    assert "moved/images.json, with which the run began" in capsys.readouterr().err
    assert copy.read_bytes() == record
    assert "root: pets.json" in Path("moved/config.yaml").read_text()
    copy.rename("moved/first.json")
    assert main(["train", "--quiet", "--config", "moved"]) != 0
    assert "moved/images.json is missing" in capsys.readouterr().err
    assert not copy.exists()
    newest = str(newest_checkpoint(Path("moved")))
    words = ["--config", "moved", "--run.directory=new", "--data.root=pets.json", f"--run.resume={newest}"]
    assert main(["train", "--quiet", *words]) == 0
    assert json.loads(Path("new/images.json").read_bytes())["val"]["a"] == sorted(val)


def test_moved_config_is_of_the_folder_where_it_lies(trained):
    assert load_config(["--config", "moved"]).run.directory == "moved"
    assert load_config(["--config", "moved/config.yaml"]).run.directory == "moved"
    assert load_config(["--config", "moved", "--run.directory", "new"]).run.directory == "new"
    Path("mine.yaml").write_text("base: moved\n")  # an experiment of its own
    assert load_config(["--config", "mine.yaml"]).run.directory == "runs/pets"


def newest_checkpoint(run: Path) -> Path:
    return list_checkpoints(run / "checkpoints")[-1].path


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_checkpoint(newest_checkpoint(run))["model"]
    return weights
