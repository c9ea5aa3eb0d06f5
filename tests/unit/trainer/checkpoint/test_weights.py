"""Files of weights and checkpoints into a model: read without executing code, with each error in one line."""

import argparse
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy
import pytest
import torch
from error_texts import naming
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import CheckpointError
from bigbatch.trainer.build.model import build_classifier
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.checkpoint.checkpoint import save_checkpoint
from bigbatch.trainer.checkpoint.weights import digest, load_weights_
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.schema import Config

save_file = pytest.importorskip("safetensors.torch").save_file

RESNET = ("model.name=resnet18", "model.options.zero_gamma=true", "model.options.blurpool=false")


def config_of(*words: str) -> Config:
    return load_config(["--config", "quickstart", *(f"--{word}" for word in words)])


def small(*words: str) -> Config:
    return config_of("model.options.width=2", *words)


def random_model(config: Config, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return build_classifier(config, nn.BatchNorm2d)


def checkpoint_of(config: Config, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    weights = random_model(config).state_dict()
    state = {"step": 3, "config": dump_config(config), "model": weights, "optimizer": {}}
    return save_checkpoint(folder, state, step=3, top1=None, keep=1), weights


def loaded(path: Path, config: Config) -> dict[str, Tensor]:
    model = random_model(config, seed=2)
    load_weights_(model, path, config=config)
    return model.state_dict()


@pytest.mark.parametrize("junk", [b"\x80\x02}]", b"\x80\x30}.", b"junk", b"hq"])
def test_junk_is_said_to_hold_no_weights(junk: bytes, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Also if the unpickler raises anything, such as KeyError(48), or warns."""
    (tmp_path / "a.pt").write_bytes(junk)
    said = refusal(tmp_path / "a.pt", small())
    assert re.search("holds no weights that torch.load reads|it ends too soon|Invalid magic number", said), said
    assert not recwarn.list


@pytest.mark.parametrize(
    "convert",
    [
        Tensor.to_sparse,
        lambda weight: weight.to(torch.float8_e4m3fn),
        lambda weight: torch.nested.as_nested_tensor([weight[0], weight[1]]),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_no_numbers_of_16_bits_or_more_are_refused_by_name(
    convert: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    config = small()
    state = random_model(config).state_dict()
    torch.save({**state, "prep.0.weight": convert(state["prep.0.weight"])}, tmp_path / "a.pt")
    said = refusal(tmp_path / "a.pt", config)
    torch.save({**state, "prep.0.weight": state["prep.0.weight"].to("meta")}, tmp_path / "b.pt")
    assert "b.pt: prep.0.weight is on the meta device" in refusal(tmp_path / "b.pt", config)
    assert "a.pt: prep.0.weight is not a dense tensor of real numbers of 16 bits or more" in said


def test_file_whose_nests_hold_each_other_is_refused(tmp_path: Path) -> None:
    """A search through every level of nesting would not end."""
    inner: dict[str, object] = {}
    outer = {"state_dict": inner}
    inner["model"] = outer
    torch.save(outer, tmp_path / "a.pt")
    assert "holds no state_dict" in refusal(tmp_path / "a.pt", small())


def test_weights_a_bomb_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    """torch.load inflates entries, which torch.save never compresses: 1 MB may hold 1 GB."""
    torch.save({"weight": torch.zeros(1 << 20)}, tmp_path / "plain.pt")
    with ZipFile(tmp_path / "plain.pt") as plain, ZipFile(tmp_path / "a.pt", "w", ZIP_DEFLATED) as bomb:
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
    assert "compressed or overlap" in refusal(tmp_path / "a.pt", small())


def test_tensor_is_refused_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    torch.save(torch.ones(3), tmp_path / "a.pt")
    assert "holds a Tensor and no state_dict" in refusal(tmp_path / "a.pt", small())
    assert not recwarn.list


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_pipe_without_writer_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    assert f"{name} is not readable as weights (it is not a regular file)" in refusal(tmp_path / name, small())


def refusal(path: Path, config: Config) -> str:
    model = random_model(config, seed=2)
    before = digest(model)
    with pytest.raises(CheckpointError) as caught:
        load_weights_(model, path, config=config)
    assert digest(model) == before, "a refused file changes nothing"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_weights_checkpoint_folder_its_file_and_plain_files(tmp_path: Path) -> None:
    config = small()
    folder, weights = checkpoint_of(config, tmp_path)
    torch.save(weights, tmp_path / "plain.pt")
    save_file(weights, tmp_path / "plain.safetensors")
    for path in (folder, folder / "state.pt", tmp_path / "plain.pt", tmp_path / "plain.safetensors"):
        assert_equal(loaded(path, config), weights)


def test_weights_half_precision_weights_become_whole(tmp_path: Path) -> None:
    config = small()
    halves = {n: t.half() if t.is_floating_point() else t for n, t in random_model(config).state_dict().items()}
    torch.save(halves, tmp_path / "half.pt")
    found = loaded(tmp_path / "half.pt", config)
    assert found["prep.0.weight"].dtype == torch.float32
    assert torch.equal(found["prep.0.weight"], halves["prep.0.weight"].float())


def test_weights_checkpoint_of_another_model(tmp_path: Path) -> None:
    path, _ = checkpoint_of(small(), tmp_path)
    said = refusal(path, config_of("model.options.width=4"))
    assert re.search(naming(path, "model.options.width ", " 2 there", " 4 here"), said)
    assert re.search(naming(path, "model.name ", " resnet9 there", " resnet18 here"), refusal(path, config_of(*RESNET)))


@pytest.mark.slow
def test_weights_checkpoint_from_before_the_resnets_had_options(tmp_path: Path) -> None:
    config = config_of(*RESNET)
    lines = [line for line in dump_config(config).splitlines() if "blurpool" not in line and "zero_gamma" not in line]
    other_start = config_of(*RESNET, "model.options.zero_gamma=false")  # which is not part of the model
    weights = random_model(config).state_dict()
    state = {"step": 3, "config": "\n".join(lines), "model": weights}
    assert_equal(loaded(save_checkpoint(tmp_path, state, step=3, top1=None, keep=1), config), weights)
    path, weights = checkpoint_of(config, tmp_path / "new")
    assert_equal(loaded(path, other_start), weights)


def test_weights_what_cannot_be_read(tmp_path: Path) -> None:
    config = small()
    folder, weights = checkpoint_of(config, tmp_path)
    assert re.search(naming(f"{tmp_path} ", "manifest.json", "checkpoints/step-00000144"), refusal(tmp_path, config))
    whole = (folder / "state.pt").read_bytes()
    (folder / "state.pt").write_bytes(whole[:-1])
    assert re.search(naming(folder, "truncated"), refusal(folder, config))
    absent = tmp_path / "absent.pt"
    assert re.search(naming(f"{absent} ", "(No such file or directory)"), refusal(absent, config))
    absent = tmp_path / "absent.safetensors"
    assert re.search(naming(f"{absent} ", "(No such file"), refusal(absent, config))
    save_file(weights, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:100])
    assert re.search(naming(tmp_path / "cut.safetensors", "readable"), refusal(tmp_path / "cut.safetensors", config))


def test_weights_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    config = small()
    weights = random_model(config).state_dict()
    weights["linear.weight"][0, 0] = torch.nan
    torch.save(weights, tmp_path / "a.pt")
    assert re.search(naming(f"{tmp_path}/a.pt: linear.weight ", "finite"), refusal(tmp_path / "a.pt", config))


@pytest.mark.parametrize("is_zip", [True, False])
def test_weights_truncated_anywhere(is_zip: bool, tmp_path: Path) -> None:
    config, path = small(), tmp_path / "cut.pt"
    torch.save(random_model(config).state_dict(), path, _use_new_zipfile_serialization=is_zip)
    whole = path.read_bytes()
    for length in (*range(12), *range(12, 400, 37), len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert refusal(path, config).startswith(f"{path}")


AROUND: dict[str, dict[str, object]] = {
    "model": {"epoch": 3, "args": argparse.Namespace(lr=0.1, output_dir=Path("runs"))},
    "state_dict": {"arch": "resnet18", "version": 2, "args": argparse.Namespace(model="resnet18")},
    "module": {"best_prec1": numpy.float64(70.1), "rates": numpy.arange(3), "optimizer": {"state": {}}},
    "net": {"hyper_parameters": argparse.Namespace(width=2), "callbacks": {"best": Path("runs")}},
}
"""What training scripts put beside weights: torchvision's, timm's, NVIDIA's, Lightning's."""


@pytest.mark.parametrize("nest", AROUND)
def test_weights_that_training_scripts_put_objects_beside_are_read(nest: str, tmp_path: Path) -> None:
    config, path, mark = small(), tmp_path / "theirs.pth", tmp_path / "executed"
    weights = random_model(config).state_dict()
    if nest == "module":
        nested: dict[str, object] = {"state_dict": {f"module.{name}": tensor for name, tensor in weights.items()}}
    else:
        nested = {nest: weights}
    torch.save({"first": Opening(mark), **nested, **AROUND[nest], "last": Opening(mark)}, path)
    assert_equal(loaded(path, config), weights)
    assert not mark.exists()


class Opening:
    """Makes a file when it is unpickled, by a function that anything may name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


def test_weights_code_is_refused_and_not_executed(tmp_path: Path) -> None:
    config, path, mark = small(), tmp_path / "trap.pt", tmp_path / "executed"
    torch.save({**random_model(config).state_dict(), "trap": Opening(mark)}, path)
    message = refusal(path, config)
    assert re.search(naming(f"{path}: ", "code (", "executed", "torch.save(model.state_dict(), FILE)"), message)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the trap works"
    torch.save(nn.Linear(1, 1), path)
    assert re.search(naming(f"{path}: ", "code (torch.nn.modules.linear.Linear)", "executed"), refusal(path, config))
    path.write_bytes(pickle.dumps({"a": 1}))
    assert "torch.save(model.state_dict(), FILE)" in refusal(path, config)


def test_weights_missing_safetensors_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    path = tmp_path / "a.safetensors"
    assert re.search(naming(f"{path} ", "pip install safetensors"), refusal(path, small()))


def parts_weights(config: Config, *, first_step: int = 0) -> dict[str, Tensor]:
    communicator = connect(env=ALONE, backend="gloo")
    plan = make_plan(config, communicator, num_samples=5000, first_step=first_step)
    parts = make_parts(config, communicator, plan=plan, tuned=None)
    return {name: tensor.clone() for name, tensor in parts.precision.model_state().items()}


@pytest.mark.slow
def test_weights_a_run_starts_from_the_weights_and_a_resumed_one_does_not_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed: list[str] = []
    monkeypatch.setattr(Communicator, "agree", lambda self, what, text: agreed.append(f"{what}: {text}"))
    words = ("optimizer.precision=bf16", "batch.global_batch_size=256")
    weights = random_model(small()).state_dict()
    weights["prep.1.running_mean"].fill_(0.25)
    torch.save(weights, tmp_path / "start.pt")
    config = small(*words, f"model.weights={tmp_path / 'start.pt'}")
    assert_equal(parts_weights(config), weights)
    torch.save(random_model(small(), 3).state_dict(), tmp_path / "start.pt")
    parts_weights(config)
    first, other = (text for text in agreed if text.startswith("the weights in model.weights"))
    assert first != other, "by which ranks with other weights are found"
    random = parts_weights(small(*words))
    assert not torch.equal(random["prep.0.weight"], weights["prep.0.weight"])
    (tmp_path / "start.pt").unlink()
    assert_equal(parts_weights(config, first_step=1), random)
    with pytest.raises(CheckpointError, match=naming(tmp_path / "start.pt", "readable")):
        parts_weights(config)


# --- a part of the weights ---

FIRST = ("conv1.*", "bn1.*", "layer?.[01].*")
DEEPER = ("model.name=resnet34", *RESNET[1:])


@pytest.mark.slow
def test_part_of_a_shallow_networks_weights_starts_a_deeper_one(tmp_path: Path) -> None:
    path, weights = checkpoint_of(config_of(*RESNET), tmp_path)
    model = random_model(config_of(*DEEPER), seed=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    told = load_weights_(model, path, config=config_of(*DEEPER), partial=FIRST).note
    found = model.state_dict()
    shared = {name for name in weights if not name.startswith("fc.")}  # 18 has two blocks a stage, and so all of these
    assert_equal({name: found[name] for name in shared}, {name: weights[name] for name in shared})
    rest = found.keys() - shared
    assert_equal({name: found[name] for name in rest}, {name: before[name] for name in rest})
    assert f"{len(shared)} of {len(found)} tensors are from {path}" in told
    assert f"{len(rest)} are initialized (layer1.2.conv1.weight, " in told
    assert "2 of the file's are not used (fc.weight, fc.bias)" in told


def test_part_of_weights_by_a_list_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    weights = random_model(small()).state_dict()
    torch.save(weights, tmp_path / "a.pt")

    def refused(*patterns: str, without: str = "none", model: nn.Module | None = None) -> str:
        torch.save({name: t for name, t in weights.items() if name != without}, tmp_path / "b.pt")
        model = model or random_model(small(), seed=2)
        before = digest(model)
        with pytest.raises(CheckpointError) as caught:
            load_weights_(model, tmp_path / "b.pt", config=small(), partial=patterns)
        assert digest(model) == before
        return str(caught.value)

    assert re.search(naming("model.partial_weights", "'prap.*'", "prep.0.weight"), refused("prap.*"))
    assert re.search(naming("b.pt", "1 of the ", "prep.0.weight"), refused("prep.*", without="prep.0.weight"))
    wide = random_model(config_of("model.options.width=4"))
    assert re.search(naming("b.pt", "prep.0.weight", "[2, 3, 3, 3]", "[4, 3, 3, 3]"), refused("prep.0.*", model=wide))


def test_part_of_weights_without_a_list_is_refused_with_the_key_that_takes_one(tmp_path: Path) -> None:
    weights = random_model(small()).state_dict()
    torch.save({name: tensor for name, tensor in weights.items() if "layer3" not in name}, tmp_path / "a.pt")
    assert "model.partial_weights" in refusal(tmp_path / "a.pt", small())


def test_run_tells_which_weights_are_from_a_file(tmp_path: Path) -> None:
    torch.save(random_model(small()).state_dict(), tmp_path / "a.pt")
    config = small(
        f"model.weights={tmp_path / 'a.pt'}",
        "model.partial_weights=[prep.*]",
        "data.loader=synthetic",
        "data.num_synthetic_samples=512",
    )
    with connect(env=ALONE, device=torch.device("cpu")) as communicator:
        parts = make_parts(
            config, communicator, plan=make_plan(config, communicator, num_samples=512, first_step=0), tuned=None
        )
        parts.reducer.close()
    assert re.search(naming("model.partial_weights", "6 of ", "are initialized"), parts.notes[0])
