"""Models and weights of torchvision and timm by name: torchvision:resnet50, timm:resnet50.a1_in1k."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigbatch.errors import CheckpointError, nearest


def library_model(name: str) -> Callable[..., nn.Module]:
    """Return the function that builds the model of that name, randomly initialized, such as timm:resnet18.

    Raises: ValueError if there is none, ImportError without timm.
    """
    library, _, model = name.partition(":")
    if library == "torchvision":
        from torchvision import models

        known, make = models.list_models(module=models), partial(models.get_model, model, weights=None)
    else:
        timm = _import_timm()
        known, make = timm.list_models(), partial(timm.create_model, model)
    # timm:resnet50.a1_in1k is timm's name of weights: its model is resnet50
    architecture = model.partition(".")[0] if library == "timm" else model
    if architecture not in known:
        near = nearest(architecture, known)
        raise ValueError(f"{library} has no such model{f'; the nearest is {library}:{near}' if near else ''}")
    return make


def _import_timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise ImportError(f"{error}: pip install timm") from error
    return timm


def timm_input(name: str) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Return mean, std and image size of timm's weights of that name. Downloads nothing.

    Raises: ValueError if there are none, ImportError without timm.
    """
    timm = _import_timm()
    facts = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if facts is None:
        near = nearest(name, timm.list_pretrained())
        raise ValueError(f"timm has no such weights{f'; the nearest are timm:{near}' if near else ''}")
    return tuple(facts.mean), tuple(facts.std), int(facts.input_size[-1])


def is_library_builder(found: object) -> bool:
    """Return whether it is a function of torchvision or timm that builds a model of library_model."""
    from torchvision import models

    name = str(getattr(found, "__name__", ""))
    if str(getattr(found, "__module__", "")).partition(".")[0] != "timm":
        return name in models.list_models(module=models) and models.get_model_builder(name) is found
    import timm  # imported already, with the module that defines found

    return timm.is_model(name) and timm.model_entrypoint(name) is found


def cached_weights(name: str) -> Path:
    """Return the file that torchvision or timm downloaded to this machine earlier for weights of that name.

    Downloads nothing: thousands of ranks would ask at once, and compute nodes often have no network.
    torchvision:resnet50 and timm:resnet50 name default weights, torchvision:resnet50.IMAGENET1K_V1 others.
    Raises: CheckpointError with the command that downloads them, or if there are no weights of that name.
    """
    library, _, model = name.partition(":")
    files, remedy = _torchvision_files(model) if library == "torchvision" else _timm_files(model)
    for file in files:
        if file.is_file():
            return file
    raise CheckpointError(
        f"{name}: {library} has not downloaded these weights to this machine. Where there is a network, and with the "
        f"same home folder, run: {remedy}"
    )


def _torchvision_files(name: str) -> tuple[list[Path], str]:
    from torchvision.models import get_model_weights

    model, _, version = name.partition(".")
    try:
        weights = get_model_weights(model)
        chosen = weights[version] if version else weights["DEFAULT"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"torchvision:{name}: torchvision has no such weights: name a model of torchvision.models, such as "
            "torchvision:resnet50 or torchvision:resnet50.IMAGENET1K_V1"
        ) from error
    remedy = f"""python -c "from torchvision.models import get_model; get_model('{model}', weights='{chosen.name}')\""""
    return [_in_hub(chosen.url)], remedy


def _timm_files(name: str) -> tuple[list[Path], str]:
    try:
        import timm
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        raise CheckpointError(f"timm:{name} needs timm: pip install timm") from error

    try:
        facts = timm.models.get_pretrained_cfg(name) if timm.is_model(name) else None
    except RuntimeError:  # a tag that the model does not have
        facts = None
    if facts is None or not facts.has_weights:
        raise CheckpointError(
            f"timm:{name}: timm has no such weights: name one of timm.list_pretrained(), such as timm:resnet50.a1_in1k"
        )
    found = []
    if facts.hf_hub_id:
        repository, _, revision = facts.hf_hub_id.partition("@")
        files = [facts.hf_hub_filename] if facts.hf_hub_filename else ["model.safetensors", "pytorch_model.bin"]
        cached = [try_to_load_from_cache(repository, file, revision=revision or None) for file in files]
        found = [Path(file) for file in cached if isinstance(file, str)]
    if facts.url:
        found.append(_in_hub(facts.url))
    return found, f"""python -c "import timm; timm.create_model('{name}', pretrained=True)\""""


def _in_hub(url: str) -> Path:
    """Return the path at which torch.hub caches a download from there."""
    return Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
