"""Check that the model settings fit each other."""

from collections.abc import Iterator

from bigbatch.errors import or_nearest
from bigbatch.trainer.config.dotted import is_dotted
from bigbatch.trainer.config.kinds import check_options
from bigbatch.trainer.config.sections import MODELS, ModelConfig

LIBRARIES = ("torchvision:", "timm:")
"""Prefixes of the names of models and weights in torchvision and timm."""
STATED_ELSEWHERE = {
    "num_classes": "data.num_classes",
    "weights": "model.weights",
    "pretrained": "model.weights",
    "checkpoint_path": "model.weights",
}
"""Arguments of a model -> the keys of the config that give them."""


def is_foreign_model(name: str) -> bool:
    """Return whether the model comes from torchvision, timm or, by its import path, from another package."""
    return "." in name or ":" in name


def check_model_name(name: str) -> Iterator[str]:
    """Yield an error for a name of unknown form. Imports nothing: the login node may lack the package."""
    if not is_foreign_model(name):
        if name not in MODELS:
            yield (
                f"model.name={name} is none of {', '.join(MODELS)}{or_nearest(name.lower(), MODELS)}. "
                "Others have names such as timm:resnet18, torchvision:resnet18 and mypackage.models.Net"
            )
        return
    _, colon, of_library = name.partition(":")
    if not (of_library and name.startswith(LIBRARIES) if colon else is_dotted(name)):
        yield (
            f"model.name={name} is not a legal name: use a form such as timm:resnet18, torchvision:resnet18 or "
            "mypackage.models.Net"
        )


def check_model(model: ModelConfig) -> Iterator[str]:
    """Yield an error for each pair of settings that contradict each other."""
    if not is_foreign_model(model.name):
        yield from check_options("model", model.name, model.options)
    for argument, key in STATED_ELSEWHERE.items():
        if is_foreign_model(model.name) and argument in (model.options or {}):
            yield f"model.options must not give {argument}: {key} does"
    if model.new_head and model.weights is None:
        yield "model.new_head=True has no meaning without model.weights, as all weights are new: set it to false"
    if model.partial_weights is not None:
        if model.weights is None:
            yield "model.partial_weights needs model.weights, which is null: set both or neither"
        if model.new_head:
            yield (
                "model.new_head=True has no meaning with model.partial_weights, which takes the last layer only if a "
                "pattern matches it: set it to false"
            )
        if not model.partial_weights:
            yield "model.partial_weights=[] takes nothing: name something, or set it and model.weights to null"
    starts_all = model.weights is not None and model.partial_weights is None and not model.new_head
    for key, value in (("init", model.init), ("linear_std", model.linear_std)):
        if value is not None and starts_all:
            yield f"model.{key}={value} has no meaning with model.weights, which start every layer: set it to null"
