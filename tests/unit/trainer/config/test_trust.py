"""A run folder from others imports nothing; only models, losses, optimizers, schedules are called; failed imports."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from error_texts import naming
from torch import nn

from bigbatch.cli import main
from bigbatch.errors import ConfigError, DataError, UserError
from bigbatch.trainer.config.dotted import import_owner
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.trust import TRUST
from bigbatch.trainer.in_python import train
from bigbatch.trainer.models.foreign import make_foreign

KEYS: dict[str, Callable[[str], list[str]]] = {
    "augment.custom": lambda name: [f"--augment.custom={{x: {{name: {name}, options: {{args: id}}}}}}"],
    "data.loader": lambda name: [f"--data.loader={name}"],
    "data.root": lambda name: [f"--data.root=class:{name}:id"],
    "model.name": lambda name: [f"--model.name={name}"],
    "optimizer.name": lambda name: [f"--optimizer.name={name}"],
    "schedule.name": lambda name: [f"--schedule.name={name}"],
    "optimizer.loss": lambda name: [
        f"--optimizer.loss={name}",
        "--optimizer.label_smoothing=0",
        "--run.divergence_steps=null",
    ],
    "run.metrics": lambda name: [f"--run.metrics={{x: {{name: {name}, options: {{args: id}}}}}}"],
}
HOSTILE = [
    *("subprocess.Popen", "planted.Net", "planted.torch.nn.Net", "torch.load", "torch.os.system"),
    *("torchvision_evil.Net", "torch_evil.nn.Net", "timm.create_model", "bigbatch.files.os.system"),
    *("torch.nnx.Net", "torch.optim_.SGD", "timm.data.create_dataset", "tоrch.nn.Linear"),  # a Cyrillic o  # noqa: RUF001
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run folder in a work folder with modules that must not be imported."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/metrics.jsonl").touch()
    for module in ("planted", "torchvision_evil", "torch_evil/nn", "torch/nnx", "torch/nn/evil"):
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("open('imported', 'w')\n")
    monkeypatch.chdir(tmp_path)
    return Path("theirs")


def write(folder: Path, text: str) -> str:
    (folder / "config.yaml").write_text(text)
    return str(folder)


def stated(key: str, name: str) -> str:
    return dump_config(load_config(["--config", "quickstart", *KEYS[key](name)]))


@pytest.mark.parametrize(
    ("key", "name"), [*((key, HOSTILE[0]) for key in KEYS), *(("model.name", name) for name in HOSTILE[1:])]
)
def test_run_folder_may_not_name_code(key: str, name: str, folder: Path) -> None:
    run = write(folder, stated(key, name))
    for named in (run, f"{run}/config.yaml"):
        with pytest.raises(ConfigError, match=naming(f"{run}/config.yaml", f"{key}: {name}", TRUST, f"--{key}")):
            load_config(["--config", named])
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["evaluate", "theirs"], "run.metrics"),
        (["evaluate", "theirs"], "optimizer.loss"),
        (["evaluate", "theirs"], "data.root"),
        (["predict", "theirs", "x.jpeg"], "data.loader"),  # the loss is not imported, and needs no trust
        (["predict", "theirs", "x.jpeg"], "model.name"),
        (["export", "theirs", "--format=safetensors", "--out=x"], "model.name"),
        (["evaluate", "--config=theirs", "--weights=theirs/x.pt"], "run.metrics"),
        (["train", "--config=theirs/config.yaml"], "run.metrics"),
        (["train", "--config=own.yaml"], "run.metrics"),
        (["train", "--config=copy/config.yaml"], "run.metrics"),
        (["tune", "range", "--config=theirs", "--from=1", "--to=2", "--steps=200", "--out=x"], "run.metrics"),
        (["doctor", "--config=theirs"], "run.metrics"),
    ],
)
def test_command_imports_nothing_of_a_run_folder(
    words: list[str], key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, stated(key, "planted.Net"))
    Path("own.yaml").write_text("base: theirs\nrun: {epochs: 20}\n")
    Path("copy").symlink_to("theirs")
    assert main(words) == 1
    assert f"{key}: planted.Net" in capsys.readouterr().err
    assert not Path("imported").exists()


@pytest.mark.parametrize("key", KEYS)
def test_code_that_the_user_names_is_taken(key: str, folder: Path) -> None:
    run = write(folder, text := stated(key, "planted.Net"))
    own = Path("own.yaml")
    own.write_text(text)
    for words in (["--config", run, TRUST], ["--config", run, *KEYS[key]("planted.Net")], ["--config=own.yaml"]):
        assert "planted.Net" in dump_config(load_config(words))
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model.name", "torchvision.models.resnet18"),
        ("model.name", "timm.models.ResNet"),
        ("optimizer.name", "torch.optim.RAdam"),
        ("optimizer.name", "bigbatch.LAMB"),
        ("optimizer.loss", "torch.nn.CrossEntropyLoss"),
        ("run.metrics", "torch.nn.functional.cross_entropy"),
    ],
)
def test_run_folder_may_name_what_libraries_hold(key: str, name: str, folder: Path) -> None:
    assert name in dump_config(load_config(["--config", write(folder, stated(key, name))]))


def test_python_takes_code_of_a_run_folder_only_if_told(folder: Path) -> None:
    run = write(folder, stated("run.metrics", "planted.Net"))
    with pytest.raises(ConfigError, match=naming("planted.Net")):
        train(run, {"run.epochs": 20})
    with pytest.raises(DataError):  # it continues with the images, and there are none
        train(run, trust_code=True)


def test_config_beside_weights_is_a_run_folders(folder: Path) -> None:
    Path("theirs/metrics.jsonl").rename("theirs/model.safetensors")
    with pytest.raises(ConfigError, match=naming("planted.Net")):
        load_config(["--config", f"{write(folder, stated('model.name', 'planted.Net'))}/config.yaml"])


def test_library_in_the_work_folder_is_not_imported(folder: Path) -> None:
    name = load_config(["--config", write(folder, stated("model.name", "torch.nn.evil.Net"))]).model.name
    with pytest.raises(ConfigError, match=naming("torch.nn.evil")):
        make_foreign(name, num_classes=7, norm=nn.BatchNorm2d, options={})
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("import no_such_package.part", ("'no_such_package'", "install the package that has it")),
        ("import sys\nsys.exit(0)", ("importing own_of_mine ends Python", "__main__")),
    ],
)
def test_own_module_that_cannot_be_imported(
    text: str, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_of_mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=naming(*parts)):
        import_owner("own_of_mine.Net")


def test_work_folder_that_was_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UserError, match=naming("the work folder was deleted", "cd to")):
        import_owner("own_of_mine.Net")


def test_run_folder_may_state_what_has_no_meaning_with_its_choices(tmp_path: Path) -> None:
    """A run states all keys, also those of a choice that an option makes; a recipe that states them is refused."""
    of_images = {"exif_orientation": True, "background": "white", "balance": 0.5}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"data": {"loader": "synthetic", "num_synthetic_samples": 64, **of_images}}))
    config = load_config(["--config", str(path)], is_run=True)
    assert [getattr(config.data, name) for name in of_images] == [False, None, 0.0]
    with pytest.raises(ConfigError, match="has no meaning with"):
        load_config(["--config", str(path)])
    path.write_text(dump_config(load_config(["--config", "quickstart"])))
    assert load_config(["--config", str(path), "--optimizer.precision=fp16"], is_run=True).optimizer.loss_scale
