"""Export formats: each has a writer, and a reader to compare the file with the model."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bigbatch.errors import ExportError, pip_install
from bigbatch.files import is_stream
from bigbatch.trainer.checkpoint.weights import write_safetensors
from bigbatch.trainer.config.schema import Config, lookup
from bigbatch.trainer.config.sections import RESNETS, DataConfig
from bigbatch.trainer.inference.plain_model import make_plain_model
from bigbatch.trainer.models.exchange import plain_tensors
from bigbatch.trainer.models.libraries import library_model

Classify = Callable[[Tensor], Tensor]
"""Maps images_BCHW to logits_BK, on the CPU."""
INPUT, OUTPUT = "images", "logits"
IMAGE = "image"
"""Input of a graph with preprocessing."""


@dataclass(frozen=True)
class Format:
    """An export format. suffix: that of its files; None if any file name is legal."""

    suffix: str | None
    write: Callable[[nn.Module, Tensor, Path, Mapping[str, Any]], None]
    """Takes the model, images_BCHW to trace it with, the file to write, and facts for serving."""
    read: Callable[[Path, Config], Classify]
    """Takes the file and the model's config. Raises: ImportError if the reader's library is not installed."""
    library: str | None = None
    """The only library that reads it, and only for its own models."""
    takes_folded: bool = True
    """Whether the file also holds the layers, and not only the weights of a known model."""


def format_of(out: Path, config: Config) -> str:
    """Return the format that the suffix of out names. Raises: ExportError if it names none."""
    suffixes = {form.suffix: name for name, form in FORMATS.items() if form.suffix}
    suffixes |= dict.fromkeys((".pth", ".pt"), "timm" if config.model.name.startswith("timm:") else "torchvision")
    if out.suffix not in suffixes:
        raise ExportError(f"{out}: name it {', '.join(f'*{suffix}' for suffix in suffixes)}, or add --format")
    return suffixes[out.suffix]


def require_format(name: str, config: Config, out: Path, *, fold: bool) -> Format:
    """Return the format of that name. Raises: ExportError if it does not go with the model, fold or the file's name."""
    chosen = FORMATS[name]
    if out.is_dir():
        file = out / f"{config.model.name}{chosen.suffix or '.pth'}"
        raise ExportError(f"--out {out} is a folder: name a file in it, such as {file}")
    if is_stream(out):  # export reads the file again, and compares it
        raise ExportError(f"--out {out} is a device or a pipe: name a file")
    is_resnet = config.model.name in RESNETS
    if chosen.library and not is_resnet and not config.model.name.startswith(f"{chosen.library}:"):
        raise ExportError(f"{name} has no {config.model.name}: choose --format safetensors, onnx or torch_export")
    if chosen.library and is_resnet and lookup(config, "model.options.blurpool"):
        raise ExportError(
            f"{name}'s {config.model.name} does not blur and this one does (model.options.blurpool): choose --format "
            "safetensors, onnx or torch_export"
        )
    if fold and not chosen.takes_folded:
        raise ExportError(
            f"readers of {name} have a {config.model.name} with batch norms: leave out --fold, or choose --format onnx"
        )
    if chosen.suffix is not None and out.suffix != chosen.suffix:
        raise ExportError(f"--out {out}: {name} writes {chosen.suffix}; name it {out.with_suffix(chosen.suffix)}")
    return chosen


def _write_state(model: nn.Module, images_BCHW: Tensor, path: Path, facts: Mapping[str, Any]) -> None:
    with open(path, "wb") as file:  # with a path, torch's error would not say why it cannot write
        torch.save(plain_tensors(model.state_dict()), file)


def _read_state(path: Path, config: Config, *, library: str) -> Classify:
    """Load the file into the library's own model."""
    name, options = config.model.name, {}
    if name not in RESNETS:
        name, options = name.partition(":")[2], config.model.options or {}
    model = library_model(f"{library}:{name}")(num_classes=config.data.num_classes, **options)
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()


def _write_safetensors(model: nn.Module, images_BCHW: Tensor, path: Path, facts: Mapping[str, Any]) -> None:
    try:
        write_safetensors(plain_tensors(model.state_dict()), path, facts=facts)
    except ImportError as error:
        raise ExportError(f"--format safetensors needs it ({error}): {pip_install('export')}") from error


def _write_onnx(model: nn.Module, images_BCHW: Tensor, path: Path, facts: Mapping[str, Any]) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ExportError(f"--format onnx needs onnx and onnxscript ({error}): {pip_install('export')}") from error
    torch.onnx.export(
        model,
        (images_BCHW,),
        path,
        dynamo=True,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=_any_batch(),
        external_data=False,  # one file; the largest model, AlexNet-BN, has a tenth of the 2 GB that fit
        verbose=False,
    )


def _read_onnx(path: Path, config: Config) -> Classify:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images_BCHW: torch.from_numpy(session.run([OUTPUT], {INPUT: images_BCHW.numpy()})[0])


def add_preprocessing(path: Path, data: DataConfig) -> None:
    """Put crop, resize and normalization of the evaluation into an ONNX file: its input becomes IMAGE.

    That is one decoded image of any size, uint8 (height, width, 3), RGB; logits are (1, K).
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(path)
    std, mean = np.array(data.std), np.array(data.mean)
    constants = {
        "pre_fraction": np.array(data.eval_crop_fraction),
        "pre_first": np.array([0, 1]),
        "pre_one": np.array([1]),
        "pre_two": np.array([2]),
        "pre_zero": np.array([0]),
        "pre_sizes": np.array([1, 3, data.image_size, data.image_size]),
        "pre_scale": (1 / (255 * std)).astype(np.float32).reshape(1, 3, 1, 1),
        "pre_shift": (-mean / std).astype(np.float32).reshape(1, 3, 1, 1),
    }
    steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
        # a square of side max(1, round(fraction * shorter side)) in the centre, as center_crop draws it
        ("Shape", [IMAGE], "pre_shape", {}),
        ("Gather", ["pre_shape", "pre_first"], "pre_sides", {}),
        ("ReduceMin", ["pre_sides"], "pre_short", {"keepdims": 1}),
        ("Cast", ["pre_short"], "pre_double", {"to": TensorProto.DOUBLE}),
        ("Mul", ["pre_double", "pre_fraction"], "pre_part", {}),
        ("Round", ["pre_part"], "pre_round", {}),
        ("Cast", ["pre_round"], "pre_whole", {"to": TensorProto.INT64}),
        ("Max", ["pre_whole", "pre_one"], "pre_side", {}),
        ("Sub", ["pre_sides", "pre_side"], "pre_free", {}),
        ("Div", ["pre_free", "pre_two"], "pre_starts", {}),
        ("Add", ["pre_starts", "pre_side"], "pre_ends", {}),
        ("Slice", [IMAGE, "pre_starts", "pre_ends", "pre_first"], "pre_cut", {}),
        ("Transpose", ["pre_cut"], "pre_chw", {"perm": [2, 0, 1]}),
        ("Unsqueeze", ["pre_chw", "pre_zero"], "pre_nchw", {}),
        ("Resize", ["pre_nchw", "", "", "pre_sizes"], "pre_resized", {"mode": "linear", "antialias": 1}),
        ("Cast", ["pre_resized"], "pre_float", {"to": TensorProto.FLOAT}),
        ("Mul", ["pre_float", "pre_scale"], "pre_scaled", {}),
        ("Add", ["pre_scaled", "pre_shift"], INPUT, {}),
    ]
    graph = model.graph
    nodes = [helper.make_node(kind, names, [output], **options) for kind, names, output, options in steps]
    nodes += graph.node
    del graph.node[:], graph.input[:], graph.output[:]
    graph.node.extend(nodes)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    graph.input.append(helper.make_tensor_value_info(IMAGE, TensorProto.UINT8, ["height", "width", 3]))
    graph.output.append(helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, [1, data.num_classes]))
    onnx.save(model, path)


def read_preprocessing(path: Path) -> Callable[[np.ndarray], Tensor]:
    """Return the function of an image (H, W, 3) that a file of add_preprocessing holds. Raises: ImportError."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda image_HWC: torch.from_numpy(session.run([OUTPUT], {IMAGE: image_HWC})[0])


def _write_program(model: nn.Module, images_BCHW: Tensor, path: Path, facts: Mapping[str, Any]) -> None:
    buffer = io.BytesIO()  # with a path, torch would abort the process on a full disk
    torch.export.save(torch.export.export(model, (images_BCHW,), dynamic_shapes=_any_batch()), buffer)
    with open(path, "wb") as file:
        file.write(buffer.getbuffer())


def _any_batch() -> tuple[dict[int, torch.export.Dim]]:
    return ({0: torch.export.Dim("batch")},)


FORMATS = {
    **{
        library: Format(None, _write_state, partial(_read_state, library=library), library=library, takes_folded=False)
        for library in ("torchvision", "timm")
    },
    "safetensors": Format(
        ".safetensors",
        _write_safetensors,
        lambda path, config: make_plain_model(config, weights=path)[0],
        takes_folded=False,
    ),
    "onnx": Format(".onnx", _write_onnx, _read_onnx),
    "torch_export": Format(".pt2", _write_program, lambda path, config: torch.export.load(path).module()),
}
