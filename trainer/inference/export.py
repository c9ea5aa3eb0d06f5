"""Export trained weights to other formats: `bigbatch export`."""

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from bigbatch import __version__
from bigbatch.errors import ExportError, UserError, find_os_error, print_line, write_failure
from bigbatch.files import as_json, replacing, write_whole
from bigbatch.paths import as_path
from bigbatch.trainer.augment.crops import center_crop
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.inference.arguments import read_trained, trained_parser
from bigbatch.trainer.inference.folding import TOLERANCE, fold_norms, num_norms
from bigbatch.trainer.inference.formats import (
    FORMATS,
    IMAGE,
    INPUT,
    OUTPUT,
    Classify,
    add_preprocessing,
    format_of,
    read_preprocessing,
    require_format,
)
from bigbatch.trainer.inference.plain_model import make_plain_model
from bigbatch.trainer.input.loaders.encoded import resize_into

TRACED_BATCH, COMPARED_BATCH = 2, 3
"""Batch sizes for tracing and comparison; they differ, which proves that the file takes any batch size."""
IMAGE_TOLERANCE = 0.03
"""TOLERANCE for the graph with preprocessing: resized pixels may be rounded to the next grey level."""


def main(argv: Sequence[str]) -> int:
    """Write the file that argv describes, compare it with the model, print JSON; return the exit code."""
    parser = _parser()
    arguments, config, weights = read_trained(parser, argv)
    named: list[Path] = [*arguments.others, *([arguments.out] if arguments.out else [])]
    if len(named) != 1:
        parser.error("name one file to write, such as resnet50.onnx")
    (out,) = named
    form = arguments.format or format_of(out, config)
    chosen = require_format(form, config, out, fold=arguments.fold)
    if arguments.with_preprocessing and form != "onnx":
        parser.error(f"--with-preprocessing puts it into the graph of onnx, and {form} has none: name a file *.onnx")
    model, loaded = make_plain_model(config, weights=weights)
    classes = loaded.classes
    facts = {
        "format": form,
        "weights": str(weights),
        **_describe(config, classes, is_within=arguments.with_preprocessing),
    }
    written = fold_norms(model) if arguments.fold else model
    facts |= {"num_norms": num_norms(model), "num_folded": num_norms(model) - num_norms(written)}
    path = out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out, suffix=out.suffix) as file:  # some writers choose the format by the suffix
            aside = Path(file.name)
            chosen.write(written, _images(TRACED_BATCH, config), aside, facts)
            facts["largest_difference"] = _compare(model, lambda: chosen.read(aside, config), config)
            if arguments.with_preprocessing:
                add_preprocessing(aside, config.data)
                if facts["largest_difference"] is not None:
                    _compare_images(model, read_preprocessing(aside), config)
        # after the file got its name, which it gets only if its logits agree
        path = Path(f"{out}.json")
        write_whole(path, (as_json(facts, indent=1) + "\n").encode())
    except UserError:
        raise
    except Exception as error:  # exporters and onnxruntime may raise anything
        reason = write_failure(path, error)
        if find_os_error(error):
            raise ExportError(f"cannot write {path}: {reason}; free some disk or name another --out") from error
        raise ExportError(
            f"this model cannot be written as {form}: {reason}; choose another --format, and please report it"
        ) from error
    if arguments.fold:
        print_line(f"{facts['num_folded']} of {facts['num_norms']} norms folded")
    if loaded.note:
        print_line(loaded.note)
    if classes is None:
        print_line(f"{weights} keeps no class names, so {out} has none")
    print_line(f"{out}: {weights} for {form}; {out}.json describes its input and output")
    return 0


def _parser() -> ArgumentParser:
    parser = trained_parser(
        "bigbatch export",
        description="Write a run's best checkpoint, or other weights, in a format of other programs.",
        others="FILE",
    )
    parser.add_argument("--format", choices=FORMATS, help="format of the file (default: by the suffix of FILE)")
    parser.add_argument("--fold", action="store_true", help="onnx, torch_export: fold batch norms into convolutions")
    parser.add_argument(
        "--with-preprocessing",
        action="store_true",
        help="onnx: crop, resize and normalize in the graph, which takes a decoded image of any size",
    )
    parser.add_argument("--out", type=as_path, help="another way to name FILE, such as resnet50.onnx")
    return parser


def _compare(model: nn.Module, read: Callable[[], Classify], config: Config) -> float | None:
    """Return the largest difference of the file's and the model's logits; None without the library that reads the file.

    Raises: ExportError if the difference is more than rounding.
    """
    try:
        classify = read()
    except ImportError as error:
        print_line(f"not compared with our model: {error}")
        return None
    images_BCHW = _images(COMPARED_BATCH, config)
    with torch.inference_mode():
        ours_BK, theirs_BK = model(images_BCHW), classify(images_BCHW)
    largest, difference = float(ours_BK.abs().max()), float((ours_BK - theirs_BK).abs().max())
    text = f"its logits differ from our model's by at most {difference:.2g}, the largest is {largest:.3g}"
    # not ">": a NaN is not agreement
    if not difference <= TOLERANCE * largest:
        raise ExportError(f"{text}: that is more than rounding, and nothing was written; please report it")
    print_line(f"{text} ({COMPARED_BATCH} random images)")
    return difference


def _compare_images(model: nn.Module, classify: Callable[[np.ndarray], Tensor], config: Config) -> None:
    """Compare the graph with preprocessing on smooth images of three sizes with the evaluation's own code, and print.

    Raises: ExportError if logits differ by more than IMAGE_TOLERANCE.
    """
    data, largest, difference = config.data, 0.0, 0.0
    crop = center_crop(fraction=data.eval_crop_fraction)
    for number, (height, width) in enumerate(((1.3, 1.7), (2.6, 1.9), (1.0, 1.0))):
        size = (round(width * data.image_size), round(height * data.image_size))
        noise = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image_HWC = np.array(Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC))  # writable, for torch
        (box,), _ = crop(0, np.zeros(1, np.int64), np.array([image_HWC.shape[:2]]))
        top, left, side, _ = box.tolist()
        pixels_HWC = np.empty((data.image_size, data.image_size, 3), np.uint8)
        resize_into(pixels_HWC, image_HWC[top : top + side, left : left + side], turn=1)
        scaled = (pixels_HWC / 255 - np.array(data.mean)) / np.array(data.std)
        images_1CHW = torch.from_numpy(scaled.transpose(2, 0, 1)[None]).float()
        with torch.inference_mode():
            ours_1K, theirs_1K = model(images_1CHW), classify(image_HWC)
        largest = max(largest, float(ours_1K.abs().max()))
        difference = max(difference, float((ours_1K - theirs_1K).abs().max()))
    text = f"with preprocessing they differ by at most {difference:.2g}, the largest is {largest:.3g}"
    if not difference <= IMAGE_TOLERANCE * largest:
        raise ExportError(f"{text}: that is more than the rounding of resized pixels; please report it")
    print_line(f"{text} (3 generated images)")


def _images(count: int, config: Config) -> Tensor:
    """Return images of normal noise, in the form of normalised ones."""
    size = config.data.image_size
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(count))


def _describe(config: Config, classes: Sequence[str] | None, *, is_within: bool = False) -> dict[str, Any]:
    """Return the facts that serving needs besides the file. is_within: the file itself preprocesses."""
    data = config.data
    facts: dict[str, Any] = {
        "model": config.model.name,
        "input": {
            "name": INPUT,
            "shape": ["batch", 3, data.image_size, data.image_size],
            "dtype": "float32",
            "values": "(RGB / 255 - mean) / std",
            "mean": data.mean,
            "std": data.std,
            "eval_crop_fraction": data.eval_crop_fraction,
            "preprocessing": [
                f"decode to 8-bit RGB, {'after' if data.exif_orientation else 'without'} applying the EXIF orientation"
                + (f", transparent images over {data.background}" if data.background else ""),
                f"crop the centre: a square of side round({data.eval_crop_fraction} * shorter side) pixels",
                f"resize to {data.image_size} x {data.image_size} pixels, bilinear with antialiasing",
                "normalize: (RGB / 255 - mean) / std",
            ],
        },
        "output": {"name": OUTPUT, "shape": ["batch", data.num_classes], "classes": classes},
        "made_by": f"bigbatch {__version__}, torch {torch.__version__}",
    }
    if is_within:
        decode, *steps = facts["input"]["preprocessing"]
        shape = {"name": IMAGE, "shape": ["height", "width", 3], "dtype": "uint8", "values": "RGB"}
        facts["input"] |= {**shape, "preprocessing": [decode], "in_graph": steps}
        facts["output"]["shape"] = [1, data.num_classes]
    return facts
