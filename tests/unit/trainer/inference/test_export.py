"""Exported files compute in their readers what the trained model computes; otherwise nothing is written."""

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from error_texts import naming
from PIL import Image
from sample_images import smooth_image
from torch import Tensor, nn

from bigbatch.cli import main
from bigbatch.trainer.checkpoint.checkpoint import save_checkpoint
from bigbatch.trainer.checkpoint.class_names import to_keep
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.inference import formats as export_formats
from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.norm import GhostBatchNorm2d

onnxruntime = pytest.importorskip("onnxruntime")
timm = pytest.importorskip("timm")
safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")

SIZE = 32
SMALL = ["--data.root=none", "--data.image_size=32"]
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "resnet9": ({"width": 2}, ["--model.options.width=2"]),
    "resnet18": ({}, ["--model.name=resnet18", "--model.options.zero_gamma=true", "--model.options.blurpool=false"]),
    "bag of tricks": (
        {"width": 2, "celu_alpha": 0.3, "norm_scale": 1.0, "is_whitened": True},
        [
            "--model.options.width=2",
            "--model.options.celu_alpha=0.3",
            "--model.options.norm_scale=1",
            "--model.options.whitening_eps=0.01",
        ],
    ),
    "blurred": (
        {"blurpool": True},
        ["--model.name=resnet18", "--model.options.zero_gamma=true", "--model.options.blurpool=true"],
    ),
}


def trained(name: str) -> nn.Module:
    """With ghost batch norm, statistics away from 0 and 1, in evaluation mode: as it is after a run."""
    torch.manual_seed(0)
    options, _ = MODELS[name]
    norm = partial(GhostBatchNorm2d, bn_span=4, ghosts_per_step=1)
    built = {"blurred": "resnet18", "bag of tricks": "resnet9"}.get(name, name)
    model = build_model(built, num_classes=10, norm=norm, **options)
    for key, tensor in model.state_dict().items():
        if "running_var" in key:
            tensor.uniform_(0.5, 1.5)
        elif "running_mean" in key:
            tensor.uniform_(-0.1, 0.1)
    return model.eval()


def export(model: str, form: str, out: Path, *words: str) -> tuple[nn.Module, int]:
    """Through the command, from a file with the model's weights."""
    source = trained(model)
    torch.save(source.state_dict(), out.parent / "weights.pt")
    command = ["--config", "quickstart", *MODELS[model][1], *SMALL, "--weights", str(out.parent / "weights.pt")]
    return source, main(["export", *command, "--format", form, "--out", str(out), *words])


def assert_same(model: nn.Module, images_BCHW: Tensor, logits_BK: Tensor) -> None:
    with torch.no_grad():
        want_BK = model(images_BCHW)
    assert float(want_BK.std()) > 1e-3
    torch.testing.assert_close(logits_BK, want_BK, rtol=1e-5, atol=1e-5 * float(want_BK.abs().max()))


def facts(out: Path) -> dict[str, Any]:
    return dict(json.loads(Path(f"{out}.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torchvision", "timm"])
def test_export_libraries_load_the_weights(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "resnet18.pth"
    out.parent.mkdir()
    source, code = export("resnet18", form, out)
    assert code == 0
    make = {"torchvision": torchvision.models.get_model, "timm": timm.create_model}[form]
    peer = make("resnet18", num_classes=10)
    peer.load_state_dict(torch.load(out, weights_only=True), strict=True)
    images_BCHW = torch.randn(5, 3, 64, 64)
    with torch.no_grad():
        assert_same(source, images_BCHW, peer.eval()(images_BCHW))
    assert "its logits differ from our model's by at most " in capsys.readouterr().out
    assert sorted(path.name for path in out.parent.iterdir()) == ["resnet18.pth", "resnet18.pth.json", "weights.pt"]


def test_export_of_a_librarys_own_model_is_by_its_name_and_with_its_norms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = timm.create_model("resnet10t", num_classes=10, stem_width=8).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    options = ["--config", "quickstart", "--model.name=timm:resnet10t", "--model.options.stem_width=8", *SMALL]
    out = tmp_path / "out.pth"
    command = ["export", *options, "--weights", str(tmp_path / "weights.pt"), "--format"]
    assert main([*command, "timm", "--out", str(out)]) == 0
    kept = torch.load(out, weights_only=True)
    assert all(kept[name].equal(tensor) for name, tensor in model.state_dict().items())
    assert main([*command, "torchvision", "--out", str(out)]) == 1
    capsys.readouterr()
    assert main([*command, "timm", "--fold", "--out", str(out)]) == 1
    assert re.search(naming("timm", "resnet10t", "--fold", "--format onnx"), refusal(capsys))


@pytest.mark.long
@pytest.mark.parametrize("model", ["bag of tricks", "blurred"])
def test_export_onnxruntime_computes_the_same_at_any_batch(model: str, tmp_path: Path) -> None:
    out = tmp_path / "model.onnx"
    source, code = export(model, "onnx", out)
    assert code == 0
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    (given,), (returned,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape, given.type) == ("images", ["batch", 3, SIZE, SIZE], "tensor(float)")
    assert (returned.name, returned.shape) == ("logits", ["batch", 10])
    for batch in (1, 7):
        images_BCHW = torch.randn(batch, 3, SIZE, SIZE)
        assert_same(source, images_BCHW, torch.from_numpy(session.run(None, {"images": images_BCHW.numpy()})[0]))


@pytest.mark.long
def test_export_with_preprocessing_answers_as_pillow_and_the_model_do(tmp_path: Path) -> None:
    """Crop by the config's fraction, Pillow's own resize, torchvision's formula: for images of any size."""
    out, fraction = tmp_path / "model.onnx", 0.8
    data = [f"--data.eval_crop_fraction={fraction}", "--data.exif_orientation=true", "--data.background=white"]
    source, code = export("resnet9", "onnx", out, "--with-preprocessing", *data)
    assert code == 0
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    (given,), (returned,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape, given.type) == ("image", ["height", "width", 3], "tensor(uint8)")
    assert (returned.name, returned.shape) == ("logits", [1, 10])
    for seed, size in enumerate([(150, 110), (40, 90), (32, 32), (64, 63), (20, 500)]):
        image = smooth_image(seed, *size)
        side = round(fraction * min(image.size))
        left, top = (image.width - side) // 2, (image.height - side) // 2
        box = image.crop((left, top, left + side, top + side)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        images_BCHW = torch.from_numpy((np.asarray(box) / 255 - 0.5) / 0.25).permute(2, 0, 1)[None].float()
        with torch.no_grad():
            want_BK = source(images_BCHW)
        found_BK = torch.from_numpy(session.run(None, {"image": np.asarray(image)})[0])
        assert float((found_BK - want_BK).abs().max()) <= 0.02 * float(want_BK.abs().max()), size
    stated = facts(out)["input"]
    assert stated["preprocessing"] == [
        "decode to 8-bit RGB, after applying the EXIF orientation, transparent images over white"
    ]
    assert [step.partition(" ")[0] for step in stated["in_graph"]] == ["crop", "resize", "normalize:"]
    assert (stated["name"], stated["dtype"]) == ("image", "uint8")


def test_export_with_preprocessing_needs_a_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        export("resnet9", "safetensors", tmp_path / "a.safetensors", "--with-preprocessing")
    assert "--with-preprocessing" in capsys.readouterr().err


def test_exported_program_computes_the_same_at_any_batch(tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    source, code = export("resnet9", "torch_export", out)
    assert code == 0
    program = torch.export.load(out).module()
    for batch in (1, 7):
        images_BCHW = torch.randn(batch, 3, SIZE, SIZE)
        assert_same(source, images_BCHW, program(images_BCHW))


def test_export_safetensors_reads_what_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit by bit, with what serving needs in the file itself; and it is weights to continue from."""
    model, out = "bag of tricks", tmp_path / "model.safetensors"
    source, code = export(model, "safetensors", out)
    assert code == 0
    with safetensors.safe_open(out, framework="pt") as file:
        found, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    state = source.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert metadata["format"] == "pt"
    told = facts(out)
    assert {name: json.loads(metadata[name]) for name in ("model", "input", "output", "made_by")} == {
        name: told[name] for name in ("model", "input", "output", "made_by")
    }
    assert told["largest_difference"] == 0.0
    assert (out.stat().st_mode & 0o777) == (tmp_path / "weights.pt").stat().st_mode & 0o777
    again = ["--config", "quickstart", *MODELS[model][1], *SMALL, "--weights", str(out)]
    assert main(["export", *again, "--format", "safetensors", "--out", str(tmp_path / "again.safetensors")]) == 0
    assert safetensors_torch.load_file(tmp_path / "again.safetensors").keys() == state.keys()
    assert main(["export", *again, "--format", "safetensors", "--fold", "--out", str(out)]) == 1
    assert re.search(naming("safetensors", "--fold"), refusal(capsys))


def write_run(folder: Path, *, top1: float = 0.0) -> nn.Module:
    """A run folder with a good checkpoint and a newer, worse one."""
    config = load_config(["--config", "quickstart", *MODELS["resnet9"][1], f"--data.root={folder / 'data'}"])
    model, best = trained("resnet9"), None
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    for step, reached in ((1, top1 + 0.75), (2, 0.5)):
        model = trained("resnet9")
        model.linear.weight.data.mul_(step)
        best = best or model
        state = {
            "step": step,
            "config": dump_config(config),
            "model": model.state_dict(),
            "classes": to_keep(list("abcdefghij")),
        }
        save_checkpoint(folder / "checkpoints", state, step=step, top1=reached, keep=2)
    assert best is not None
    return best


def test_export_says_what_serving_needs_to_know(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "below" / "a.safetensors"
    best = write_run(run)
    for name in "bcdefghijk":  # what is in the folder now is not what the run was trained on
        (run / "data/train" / name).mkdir(parents=True)
    assert main(["export", str(run), "--format", "safetensors", "--out", str(out)]) == 0
    found = facts(out)
    assert found["weights"] == str(run / "checkpoints/step-00000001"), "the best, not the newest"
    assert found["format"] == "safetensors"
    assert found["model"] == "resnet9"
    assert found["input"] == {
        "name": "images",
        "shape": ["batch", 3, 48, 48],
        "dtype": "float32",
        "values": "(RGB / 255 - mean) / std",
        "mean": [0.5, 0.5, 0.5],
        "std": [0.25, 0.25, 0.25],
        "eval_crop_fraction": 1.0,
        "preprocessing": [
            "decode to 8-bit RGB, without applying the EXIF orientation",
            "crop the centre: a square of side round(1.0 * shorter side) pixels",
            "resize to 48 x 48 pixels, bilinear with antialiasing",
            "normalize: (RGB / 255 - mean) / std",
        ],
    }
    assert found["output"] == {"name": "logits", "shape": ["batch", 10], "classes": list("abcdefghij")}
    assert torch.equal(safetensors_torch.load_file(out)["linear.weight"], best.linear.weight)
    newest = run / "checkpoints/step-00000002"
    assert main(["export", str(run), "--checkpoint", str(newest), "--format", "safetensors", "--out", str(out)]) == 0
    assert torch.equal(safetensors_torch.load_file(out)["linear.weight"], 2 * best.linear.weight)


def test_export_serving_by_its_description_answers_as_predict_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With Pillow and numpy, in the steps of input.preprocessing; the suffix names the format."""
    run, out = tmp_path / "run", tmp_path / "a.safetensors"
    model = write_run(run)
    keys = ["--data.eval_crop_fraction=0.8", "--data.loader=torchvision"]
    assert main(["export", str(run), str(out), *keys]) == 0
    image, told = smooth_image(3), facts(out)["input"]
    image.save(tmp_path / "a.png")
    side = round(told["eval_crop_fraction"] * min(image.size))
    left, top = (image.width - side) // 2, (image.height - side) // 2
    cropped = image.crop((left, top, left + side, top + side)).resize(told["shape"][2:], Image.Resampling.BILINEAR)
    pixels_HWC = (np.asarray(cropped, np.float32) / 255 - told["mean"]) / told["std"]
    images_BCHW = torch.from_numpy(pixels_HWC.transpose(2, 0, 1)[None].astype(np.float32))
    shares_K = model(images_BCHW)[0].detach().softmax(0)
    capsys.readouterr()
    assert main(["predict", str(run), str(tmp_path / "a.png"), *keys, "--json", "--top=10"]) == 0
    answers = json.loads(capsys.readouterr().out)["classes"]
    names = facts(out)["output"]["classes"]
    assert {each["class"]: each["probability"] for each in answers} == pytest.approx(
        dict(zip(names, shares_K.tolist(), strict=True)), abs=0.01
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["a.bin"], ("a.bin", "*.onnx", "--format")),
        (["a.pth"], ("torchvision has no resnet9", "--format safetensors")),
    ],
)
def test_export_a_suffix_that_names_no_format(
    words: list[str], parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), *words]) == 1
    assert re.search(naming(*parts), refusal(capsys))
    for none_or_two in ([], ["a.onnx", "--out=b.onnx"]):
        with pytest.raises(SystemExit, match="2"):
            main(["export", str(tmp_path / "run"), *none_or_two])
        assert "one file" in refusal(capsys).splitlines()[-1]


@pytest.mark.slow
def test_export_of_a_sweep_is_of_its_best_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Points 0 and 1 are finished, and 1 is better; 2 is still better and not finished."""
    for number, state in enumerate(("done", "done", "failed")):
        point = tmp_path / f"sweep/points/{number}"
        point.mkdir(parents=True)
        (point / "point.json").write_text(json.dumps({"state": state, "number": number, "values": {}}))
        write_run(point / "run", top1=0.2 * (2 - number))  # of the best checkpoints, by which runs are not compared
        (point / "run/summary.json").write_text(json.dumps({"top1": 0.2 * number}))
    sweep, out = tmp_path / "sweep", tmp_path / "a.safetensors"
    (sweep / "sweep.yaml").write_text("name: a\n")
    assert main(["export", str(sweep), str(out)]) == 0
    assert facts(out)["weights"] == str(sweep / "points/1/run/checkpoints/step-00000001")
    assert re.search(naming("points/1/run", "best of 2", "20.00% in its last evaluation"), refusal(capsys))
    (sweep / "points/0/point.json").write_text(json.dumps({"state": "failed", "number": 0, "values": {}}))
    (sweep / "points/1/point.json").write_text(json.dumps({"state": "failed", "number": 1, "values": {}}))
    assert main(["export", str(sweep), str(out)]) == 1
    assert re.search(naming(str(sweep), "without a finished run"), refusal(capsys))


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("model", "form", "name", "parts"),
    [
        ("resnet9", "torchvision", "a.pth", ("torchvision has no resnet9", "--format safetensors, onnx")),
        ("blurred", "timm", "a.pth", ("timm's resnet18", "model.options.blurpool")),
        ("resnet9", "onnx", "a.pth", ("onnx writes .onnx",)),
        ("resnet9", "torch_export", "a", ("torch_export writes .pt2",)),
    ],
)
def test_export_messages_of_what_does_not_go_together(
    model: str, form: str, name: str, parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(model, form, tmp_path / name)[1] == 1
    assert re.search(naming(*parts), refusal(capsys))
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


def test_export_other_logits_are_an_error_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in (lambda images_BCHW: torch.zeros(3, 10), lambda images_BCHW: torch.full((3, 10), torch.nan)):
        form = export_formats.Format(None, export_formats._write_state, lambda path, config: wrong)  # noqa: B023
        monkeypatch.setitem(export_formats.FORMATS, "torchvision", form)
        assert export("resnet9", "torchvision", tmp_path / "a.pth")[1] == 1
        assert re.search(naming("rounding", "report"), refusal(capsys))
        assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


@pytest.mark.long
def test_export_without_their_library_it_is_written_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert export("resnet18", "timm", tmp_path / "a.pth")[1] == 0
    assert "import of timm halted" in capsys.readouterr().out
    assert facts(tmp_path / "a.pth")["largest_difference"] is None


@pytest.mark.parametrize("library", ["onnxscript", "safetensors.torch"])
def test_export_missing_extra_is_named(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    form = "onnx" if library.startswith("onnx") else "safetensors"
    assert export("resnet9", form, tmp_path / f"a.{form}")[1] == 1
    assert "pip install -e '.[export]' in " in refusal(capsys)


def test_export_a_place_that_takes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(trained("resnet9").state_dict(), tmp_path / "weights.pt")
    command = ["--config", "quickstart", *MODELS["resnet9"][1], *SMALL, "--weights", str(tmp_path / "weights.pt")]
    for out in (".", "..", str(tmp_path)):
        assert main(["export", *command, "--format", "onnx", "--out", out]) == 1
        assert re.search(naming(f"--out {Path(out)} ", "folder"), refusal(capsys))
    below = tmp_path / "weights.pt" / "a.safetensors"
    assert main(["export", *command, "--format", "safetensors", "--out", str(below)]) == 1
    assert f" {below}: " in refusal(capsys)


def fail(error: Exception) -> None:
    raise error


def test_export_names_the_description_if_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.safetensors.json").mkdir()
    assert export("resnet9", "safetensors", tmp_path / "a.safetensors")[1] == 1
    assert f"cannot write {tmp_path / 'a.safetensors.json'}: " in refusal(capsys)


def test_export_only_a_full_disk_is_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = [
        export_formats._write_state,
        export_formats._write_program,
        lambda *_: fail(OSError(28, "No space left on device")),
    ]
    monkeypatch.setattr(export_formats, "open", lambda path, mode: open("/dev/full", mode), raising=False)  # noqa: SIM115
    others = [RuntimeError("no such operator\nand more"), TypeError("onnxruntime's are plain"), RuntimeError()]
    for write in (*full, *(partial(lambda error, *_: fail(error), other) for other in others)):
        form = export_formats.Format(None, write, lambda path, config: None)
        monkeypatch.setitem(export_formats.FORMATS, "torchvision", form)
        assert export("resnet9", "torchvision", tmp_path / "a.pth")[1] == 1
    *of_disk, of_operator, of_reader, without_words = refusal(capsys).splitlines()
    assert len(of_disk) == 3
    for line in of_disk:
        assert re.search(naming(f" {tmp_path / 'a.pth'}: No space left on device, ", "MB are free", "--out"), line)
    assert re.search(naming("bigbatch: ", "torchvision: no such operator; ", "--format"), of_operator)
    assert re.search(naming("torchvision: onnxruntime's are plain; ", "--format"), of_reader)
    assert re.search(naming("torchvision: RuntimeError; ", "--format"), without_words)


def test_export_class_names_are_the_runs_and_come_back_with_safetensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, first, second = tmp_path / "run", tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_run(run)
    (run / "data/train/other").mkdir(parents=True)
    form = ["--format", "safetensors", "--out"]
    assert main(["export", str(run), *form, str(first)]) == 0
    weights = ["--config", "quickstart", *MODELS["resnet9"][1], *SMALL, "--weights", str(first)]
    assert main(["export", *weights, *form, str(second)]) == 0
    assert facts(first)["output"]["classes"] == facts(second)["output"]["classes"] == list("abcdefghij")
    assert "class names" not in capsys.readouterr().out
    assert export("resnet9", "safetensors", first)[1] == 0
    assert facts(first)["output"]["classes"] is None
    assert re.search(naming(f"{tmp_path / 'weights.pt'} keeps no class names"), capsys.readouterr().out)


@pytest.mark.parametrize("classes", ['["a"]', '"abcdefghij"', "[1, 2, 3, 4, 5, 6, 7, 8, 9, 0]", "[[", None])
def test_export_class_names_in_metadata_that_are_none_are_refused(
    classes: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, metadata = tmp_path / "a.safetensors", {"made_by": '"bigbatch 9"'}
    output = {} if classes is None else {"output": f'{{"classes": {classes}}}'}
    safetensors_torch.save_file(trained("resnet9").state_dict(), file, metadata=metadata | output)
    weights = ["--config", "quickstart", *MODELS["resnet9"][1], *SMALL, "--weights", str(file)]
    assert main(["export", *weights, "--format", "safetensors", "--out", str(tmp_path / "b.safetensors")]) == 1
    assert re.search(naming(f"{file} is damaged", "class"), refusal(capsys))
