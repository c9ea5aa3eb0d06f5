"""Gradients of a model in the order in which backward finishes them. Pure."""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from bigbatch.comm.gradients.fusion import TensorSpec
from bigbatch.errors import SimulationError, or_nearest
from bigbatch.trainer.config.sections import ModelConfig

LAYERS = "layers.json"
"""For each model its layers, in the order of forward: [operations of one image's forward in millions, [elements of
each parameter]]. `python -m benchmarks.twin.layers` makes it from torchvision's models; a test compares the two."""


PIXELS = {"inception_v3": 299, "resnet9": 32}
"""Image sizes of models that are not stored at 224."""
RESNET9_WIDTH = 64
MIN_SQUARE = 30_000
"""Elements of resnet9's tensors from which on they grow by the square of its width; the others by the width."""


@dataclass(frozen=True)
class ModelShape:
    """A model's name and its gradients in backward's order.

    ready_shares: share of backward that is over when each is ready, by its operations; 1 for the last.
    """

    name: str
    num_elements: tuple[int, ...]
    ready_shares: tuple[float, ...]
    operations: float
    """Operations of one image's forward: multiplications and additions."""
    pixels: int = 224
    """Pixels of a side of that image."""

    @property
    def num_parameters(self) -> int:
        return sum(self.num_elements)

    def tensors(self, element_bytes: int) -> tuple[TensorSpec, ...]:
        return _tensors(self, element_bytes)


@cache
def _tensors(shape: ModelShape, element_bytes: int) -> tuple[TensorSpec, ...]:
    dtype = {2: "float16", 4: "float32"}[element_bytes]
    return tuple(TensorSpec(f"{i}", count, element_bytes, dtype) for i, count in enumerate(shape.num_elements))


@cache
def shape_names() -> tuple[str, ...]:
    return tuple(_stored())


@cache
def load_shape(name: str) -> ModelShape:
    """Return a model's shape. Raises: SimulationError for an unknown one."""
    if name not in _stored():
        choice = shape_names()
        raise SimulationError(f"no shape of {name} is known{or_nearest(name, choice)}; known are {', '.join(choice)}")
    layers = _stored()[name]
    total = sum(operations for operations, _ in layers)
    done = 0.0
    elements: list[int] = []
    shares: list[float] = []
    for operations, counts in reversed(layers):
        done += operations
        elements += reversed(counts)
        shares += [min(1.0, done / total)] * len(counts)
    return ModelShape(name, tuple(elements), tuple(shares), total * 1e6, PIXELS.get(name, 224))


def shape_of(config: ModelConfig) -> ModelShape:
    """Return the shape of an experiment's model. Raises: SimulationError for an unknown one."""
    shape = load_shape(config.name)
    if config.name != "resnet9" or not config.options:
        return shape
    factor = config.options["width"] / RESNET9_WIDTH
    elements = tuple(round(n * (factor**2 if n >= MIN_SQUARE else factor)) for n in shape.num_elements)
    return replace(shape, num_elements=elements, operations=shape.operations * factor**2)


@cache
def _stored() -> dict[str, list[tuple[float, list[int]]]]:
    text = resources.files(__package__).joinpath(LAYERS).read_text()
    return {name: [(operations, counts) for operations, counts in layers] for name, layers in json.loads(text).items()}
