"""Load weights from checkpoints and files, including foreign ones, into a model without executing code in them."""

import errno
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.errors import CheckpointError, DamagedCheckpoint
from bigbatch.files import as_json, parse_json, write_whole
from bigbatch.trainer.checkpoint.checkpoint import MANIFEST_FILE, load_checkpoint, load_tensors
from bigbatch.trainer.checkpoint.class_names import kept_names, require_names
from bigbatch.trainer.checkpoint.fields import require_fields
from bigbatch.trainer.checkpoint.resume import require_same_model
from bigbatch.trainer.config.checks import LIBRARIES
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.models.exchange import from_foreign, holds_weights, names_head, partly_from_foreign
from bigbatch.trainer.models.libraries import cached_weights


@dataclass(frozen=True)
class LoadedWeights:
    """Result of loading weights into a model."""

    note: str
    """Log text if only a part or an average was loaded, or the file has a loss scale; else empty."""
    has_head: bool
    """Whether the last layer was loaded."""
    classes: tuple[str, ...] | None
    """Class names of the last layer, if it was loaded and the file has names."""


def load_weights_(
    model: nn.Module, path: Path, *, config: Config, new_head: bool = False, partial: Sequence[str] | None = None
) -> LoadedWeights:
    """Copy the weights in path (a checkpoint folder, a file, torchvision:NAME or timm:NAME) into a model of config.

    new_head: keep the model's own last layer. partial: load only names that match these patterns.
    Raises: CheckpointError if path is not readable, has no weights, or has those of another model.
    """
    state = _read(path)
    scale = _apex_scale(state)
    names: Sequence[str] | None = None
    if isinstance(state, Mapping) and isinstance(state.get("config"), str) and "model" in state:  # a checkpoint
        names = kept_names(state, source=str(path))
        require_same_model(state["config"], config, source=str(path), is_partial=bool(partial))
        state = evaluated_weights(state)
    elif path.suffix == ".safetensors":
        names = _exported_names(path)
    notes: list[str] = []
    if partial is None:
        weights = from_foreign(state, model, source=str(path), new_head=new_head, say=notes.append)
    else:
        weights = partly_from_foreign(state, model, source=str(path), patterns=partial, say=notes.append)
    if empty := [name for name, tensor in weights.items() if tensor.is_meta]:
        raise CheckpointError(
            f"{path}: {empty[0]} is on the meta device, without values: save the model from another device"
        )
    if odd := next(_damaged(weights, model), None):
        raise CheckpointError(f"{path}: {odd} holds values that are not finite: name weights of an earlier step")
    has_head = not new_head and (partial is None or names_head(model, partial))
    classes = None
    if has_head and names is not None:
        classes = require_names(names, num_classes=config.data.num_classes, source=str(path))
    model.load_state_dict(weights)
    if scale and config.optimizer.loss_scale not in (None, scale):
        hint = f"{path} holds apex.amp's loss scale {scale:g}: to start with it, add --optimizer.loss_scale {scale:g}"
        notes.append(hint)
    return LoadedWeights("; ".join(notes), has_head, classes)


def _damaged(weights: Mapping[str, Tensor], model: nn.Module) -> Iterator[str]:
    """Yield the names of tensors with NaN, or with inf in weights and statistics, unless model starts with the same.

    Other buffers may hold inf, such as masks of -inf.
    """
    own, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in weights.items():
        may_be_inf = name not in parameters and not name.endswith(("running_mean", "running_var"))
        values = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no isfinite
        is_odd = values.isnan() if may_be_inf else ~values.isfinite()
        if is_odd.any() and not values.isclose(own[name].to(values), equal_nan=True).all():
            yield name


def _apex_scale(state: Any) -> float | None:
    """Return the loss scale of apex.amp in a checkpoint; None if there is none."""
    if not isinstance(state, Mapping):  # a tensor would warn of an index by name
        return None
    try:
        return float(state["amp"]["loss_scaler0"]["loss_scale"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def digest(model: nn.Module) -> str:
    """Return a digest of all weights and buffers, which ranks compare."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _read(path: Path) -> Any:
    if str(path).startswith(LIBRARIES):
        path = cached_weights(str(path))
    if not path.is_dir():
        return _read_file(path)
    if not (path / MANIFEST_FILE).is_file():
        raise CheckpointError(
            f"{path} is not a checkpoint, it holds no {MANIFEST_FILE}: name a folder such as "
            "runs/quickstart/checkpoints/step-00000144, or a file"
        )
    state = load_checkpoint(path)
    require_fields(state, source=f"checkpoint {path}", are_weights=True)
    return state


def _read_file(path: Path) -> Any:
    if path.exists() and not path.is_file():  # to open a named pipe without a writer would wait forever
        raise _unreadable(path, OSError(errno.EINVAL, "it is not a regular file"))
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        return _load(path)
    except (OSError, EOFError, RuntimeError) as error:
        raise _unreadable(path, error) from error
    except Exception as error:  # for damaged bytes the unpickler may raise anything, such as KeyError(48)
        state = _read_beside_objects(path)
        if state is not None:
            return state
        if code := re.search(r"GLOBAL (\S+)", str(error)):  # the important line of torch.load's message
            why = (
                f"it holds code ({code[1]}), which is not executed, beside or instead of weights: save those alone, "
                "with torch.save(model.state_dict(), FILE)"
            )
        else:
            why = "it holds no weights that torch.load reads: save them with torch.save(model.state_dict(), FILE)"
        raise CheckpointError(f"{path}: {why}") from error


def _load(path: Path, *, stand_in_for: Sequence[str] = ()) -> Any:
    stand_ins: list[Any] = [(_StandIn, name) for name in stand_in_for]
    with warnings.catch_warnings(), torch.serialization.safe_globals(stand_ins):
        warnings.simplefilter("ignore")  # about pickle protocols: the caller reports the result
        return load_tensors(path)


class _StandIn:
    """Stand-in for any object in a file that is not a tensor, text, number or collection of these."""

    def __new__(cls, *_: object) -> "_StandIn":
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


def _read_beside_objects(path: Path) -> Any:
    """Return a file's weights despite other objects, such as an argparse.Namespace; None if there are no weights.

    Does not import or execute their code: a stand-in replaces each object.
    """
    try:
        state = _load(path, stand_in_for=torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # the caller reports torch.load's error
        return None
    return state if holds_weights(state) else None


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(f"{path} needs safetensors: pip install safetensors") from error
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _exported_names(path: Path) -> Sequence[str] | None:
    """Return the class names in an exported file, unchecked; None if there are none."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if not metadata.get("made_by", "").startswith('"bigbatch '):
        return None
    try:
        names: Sequence[str] | None = parse_json(metadata["output"])["classes"]
        return names
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: its metadata does not list its classes ({error!r})") from error


def write_safetensors(state: Mapping[str, Tensor], path: Path, *, facts: Mapping[str, Any]) -> None:
    """Write contiguous tensors that share no memory; each fact becomes metadata of the file, as JSON.

    Raises: ImportError without safetensors; OSError.
    """
    from safetensors.torch import save

    # format: transformers and others read the framework from it
    metadata = {name: as_json(fact) for name, fact in facts.items()} | {"format": "pt"}
    # save_file would replace this file by one with other permissions
    write_whole(path, save(dict(state), metadata=metadata))


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "it ends too soon")
    return CheckpointError(f"{path} is not readable as weights ({reason}): copy or download it again")


def evaluated_weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights with which a checkpoint was evaluated: the average, if the run had one."""
    return {**state["model"], **state.get("average", {})}
