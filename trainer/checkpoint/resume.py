"""Resume a run: choose the checkpoint, compare config and images with it, and load its state."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigbatch.comm.rendezvous.control import Control
from bigbatch.errors import CheckpointError, DamagedCheckpoint, shortened
from bigbatch.parts import load
from bigbatch.trainer.checkpoint.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    load_intact,
    read_manifest,
    restoring,
)
from bigbatch.trainer.checkpoint.class_names import kept_names, require_same_names
from bigbatch.trainer.config.file import dump_config, read_dumped
from bigbatch.trainer.config.kinds import OPTION_KEYS, is_option
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.optim.param_groups import load_optimizer_state
from bigbatch.trainer.step.plan import Parts

SAME_STATE = {"lamb", "adamw"}
"""Optimizers with the same state: one can resume from the other's."""

ONLY_AT_START = ("model.options.zero_gamma", "model.options.whitening_eps")
"""Model options that affect only the initialization."""

OTHER_CLASSES = (
    "Bring the classes back, or start again from its weights, with model.weights, model.new_head=true and another "
    "run.directory"
)

OBJECTIVE = ("model.frozen", "optimizer.loss", "optimizer.loss_options", "optimizer.exclude_bias_and_norm")
"""Keys that decide which weights are trained, by which loss, and in which groups."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a run starts: at step 0 with these defaults, or after a checkpoint's step with values from it."""

    path: Path | None = None
    step: int = 0
    owes_evaluation: bool = False
    """Whether an evaluation was due after the step and is missing."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Bad images that the run has met, with the reason: train/3 is the fourth training image."""
    config: str | None = None
    evaluations: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    """Results of the run's evaluations, by step, oldest first."""
    gradient_order: str | None = None
    """Parameters in the order of their gradients, one name per line; it decides how sums are rounded."""
    sums: Mapping[str, str] = field(default_factory=dict)
    """Other facts that decide the rounding, by describe_sums."""
    sha256: str | None = None
    """SHA-256 of the checkpoint: without a shared disk, nodes may have different ones of the same name."""
    damaged: Mapping[Path, str] = field(default_factory=dict)
    """Newer checkpoints that a rank finds damaged, newest first, with the reason."""
    is_of_unknown_classes: bool = False
    """Whether the checkpoint has no class names to compare with those of the data."""
    is_of_other_images: bool = False
    """Whether the checkpoint was trained on other images, whose epoch may have had another number of steps."""
    is_of_other_val: bool = False
    """Whether the run was evaluated on other validation images: those results do not count."""


def find_start(
    config: Config, rundir: RunDir, *, samples: str | None, control: Control, classes: Sequence[str] | None = None
) -> tuple[ResumePoint, dict[str, Any]]:
    """Return where to start, and the state to restore (empty for a new run). Collective.

    samples: digest of the training images. classes: their class names, or None.
    Raises: CheckpointError, also if the checkpoint belongs to another run or has other classes.
    """
    path, state, damaged = _find_state(config, rundir, control=control)
    if path is None:
        return ResumePoint(), {}
    start = _start_from(path, state, config, folder=rundir.checkpoints, samples=samples, classes=classes)
    return replace(start, damaged=damaged), state


def _start_from(
    path: Path,
    state: dict[str, Any],
    config: Config,
    *,
    folder: Path,
    samples: str | None,
    classes: Sequence[str] | None,
) -> ResumePoint:
    """Return the start of a run from a checkpoint, after comparing both. folder: that of the run's checkpoints."""
    is_resumed = config.run.resume == "auto"
    changed = changes(state["config"], dump_config(config))
    is_of_images = state["samples"] == samples
    # its steps are not steps of this config: samples would be repeated or skipped
    if is_resumed and "run.seed" in changed:
        raise CheckpointError(
            f"the run folder holds a run with another run.seed: {changed['run.seed']}. Choose another run.directory, "
            "or name the checkpoint to start from with --run.resume"
        )
    sizes = ("batch.global_batch_size", *(["data.num_synthetic_samples"] if is_of_images else []))
    if odd := [key for key in sizes if key in changed]:
        raise CheckpointError(
            f"checkpoint {path} counts steps of another {odd[0]}: {changed[odd[0]]}. Set it as it was, or start a new "
            "run from its weights (model.weights, another run.directory)"
        )
    trained = kept_names(state, source=f"checkpoint {path}")
    if trained and classes:
        require_same_names(trained, classes, source=f"checkpoint {path}", root=config.data.root, remedy=OTHER_CLASSES)
    if is_resumed and not is_of_images:  # the order of images in an epoch would differ
        raise CheckpointError(
            f"the training images in {config.data.root} are not those of the run folder's checkpoint: some were added, "
            "removed or given another class. Bring them back, choose another run.directory, or name the checkpoint to "
            "start from with --run.resume"
        )
    require_same_model(state["config"], config, source=f"checkpoint {path}")
    require_same_optimizer(state["config"], config.optimizer.name, path=path)
    require_same_objective(state["config"], config, path=path)
    is_in_folder, manifest = path.resolve().parent == folder.resolve(), read_manifest(path)
    evaluations = state["evaluations"] if is_of_images and is_in_folder else []
    return ResumePoint(
        path=path,
        step=int(state["step"]),
        owes_evaluation=is_in_folder and manifest.get("top1") is None,
        skipped=dict(state["skipped"]) if is_of_images else {},
        config=state["config"],
        evaluations={record["step"]: record for record in evaluations},
        gradient_order=state["gradient_order"],
        sums=dict(state["sums"]),
        sha256=manifest["sha256"],
        is_of_unknown_classes=not trained and bool(classes) and not is_of_images,
        is_of_other_images=not is_of_images,
    )


def _find_state(
    config: Config, rundir: RunDir, *, control: Control
) -> tuple[Path | None, dict[str, Any], dict[Path, str]]:
    """Return the checkpoint of run.resume, its state, and damaged newer ones."""
    path: Path | None = None
    state: dict[str, Any] = {}
    damaged: dict[Path, str] = {}
    if config.run.resume == "auto":
        checkpoints = list_checkpoints(rundir.checkpoints)
        if checkpoints or control.world_size > 1:  # other ranks may see some
            path, state, damaged = _load_newest_intact([each.path for each in checkpoints], control)
        if damaged and not path:
            raise CheckpointError(
                f"{next(iter(damaged.values()))}; none of {len(damaged)} checkpoints is intact: start again in another "
                "run.directory"
            )
    elif config.run.resume != "never":
        path = Path(config.run.resume)
        state = load_checkpoint(path)
        _require_state(state, path)
    elif held := list_checkpoints(rundir.checkpoints):
        raise CheckpointError(
            f"{rundir.path} holds a run already (step {held[-1].step}): choose another run.directory, or set "
            "run.resume to auto to continue"
        )
    return path, state, damaged


def _require_state(state: Mapping[str, Any], path: Path) -> None:
    """Raise DamagedCheckpoint if the state, or its step beside the manifest's, is not as a run writes it."""
    load("bigbatch.trainer.checkpoint.fields.require_fields")(state, source=f"checkpoint {path}")
    if (stated := read_manifest(path).get("step")) != state["step"]:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: its manifest is of step {shortened(stated)}")


def start_in_memory(state: Mapping[str, Any], *, samples: str | None, root: str) -> ResumePoint:
    """Return the start of a run that continues from a state in memory. samples: digest of the training images in root.

    Raises: CheckpointError if the images changed since the run began.
    """
    if state["samples"] != samples:
        raise CheckpointError(
            f"the training images in {root} are not those with which the run began: some were "
            "added, removed or given another class. Bring them back, and start the same command again"
        )
    evaluations = {record["step"]: record for record in state["evaluations"]}
    return ResumePoint(
        step=state["step"],
        owes_evaluation=state["step"] not in evaluations,
        skipped=dict(state["skipped"]),
        evaluations=evaluations,
        gradient_order=state["gradient_order"],
    )  # without sums, so there is no line on other rounding: the line about the lost rank states the number of ranks


def restore_(parts: Parts, state: dict[str, Any], *, path: Path, stated: Collection[str] | None) -> None:
    """Load a state into parts, in place. path: its checkpoint, named in messages. stated: see load_optimizer_state.

    Raises: CheckpointError if it does not fit.
    """
    with restoring(path):
        from_foreign = load("bigbatch.trainer.models.exchange.from_foreign")
        weights = from_foreign(state["model"], parts.model, source=f"checkpoint {path}")
        trained = {name for name, _ in parts.model.named_parameters(remove_duplicate=False)}
        if odd := [name for name in weights if name in trained and not weights[name].isfinite().all()]:
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: {odd[0]} holds values that are not finite")
        parts.precision.load_model_state(weights)
        load_optimizer_state(parts.optimizer, state["optimizer"], stated=stated)
        if parts.two_weights:
            if not state["in_training"]:
                raise DamagedCheckpoint(f"checkpoint {path} is damaged: its training weights are missing")
            parts.two_weights.restore(state["in_training"])
        # both may have replaced the masters that load_model_state published
        parts.precision.write_half_()
        parts.precision.load_state_dict(state["precision"])
        if parts.average:
            parts.average.load_state_dict(state["average"])


def _load_newest_intact(paths: Sequence[Path], control: Control) -> tuple[Path | None, dict[str, Any], dict[Path, str]]:
    """Load the last path that no rank finds damaged; return it, its state, and damaged ones with reasons. Collective.

    Ranks that see different files may return different checkpoints, which the caller must compare.
    Raises: CheckpointError for a checkpoint that cannot be read.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(paths):
        state, why = dict[str, Any](), ""
        try:
            state = load_intact(path)
            _require_state(state, path)
        except DamagedCheckpoint as error:
            why = str(error)
        is_common, reason = _compare(path.name, why, control)
        if not reason:
            return path, state, damaged
        if not is_common:
            raise CheckpointError(reason)
        damaged[path] = reason
    _compare("", "", control)  # matches the collective of a rank that sees a further checkpoint
    return None, {}, damaged


def _compare(name: str, why: str, control: Control) -> tuple[bool, str]:
    """Return whether all ranks have read a checkpoint of that name, and why one found it damaged. Collective."""
    seen = [text.partition(" ") for text in control.gather_text(f"{name} {why}", what="search for a checkpoint")]
    if any(other != name for other, _, _ in seen):
        return False, why
    return True, next((reason for _, _, reason in seen if reason), "")


def require_same_model(text: str, config: Config, *, source: str, is_partial: bool = False) -> None:
    """Raise CheckpointError if the config in text, that of the weights in source, has another model than config.

    is_partial: only a part is loaded, so names and options of the models may differ.
    """
    values, own = read_dumped(text), read_dumped(dump_config(config))
    options = sorted({key for key in (*values, *own) if key.startswith("model.options.")} - {*ONLY_AT_START})
    for key in filter(OPTION_KEYS.__contains__, options) if is_partial else ("model.name", *options):
        there, here = values.get(key), own.get(key)
        # false and null both mean that an option is off
        if (there or None) != (here or None):
            raise CheckpointError(
                f"{source} is of another model: {key} is {as_yaml(there)} there and {as_yaml(here)} here: set it as it "
                "was for these weights"
            )


def require_same_optimizer(old: str, name: str, *, path: Path) -> None:
    """Raise CheckpointError if the optimizer cannot use another optimizer's state."""
    there = read_dumped(old)["optimizer.name"]
    if there != name and {there, name} != SAME_STATE:
        raise CheckpointError(
            f"checkpoint {path} holds the state of optimizer.name={there}, which is not that of {name}: set it to "
            f"{there}, or start again from its weights, with model.weights and another run.directory"
        )


def require_same_objective(old: str, config: Config, *, path: Path) -> None:
    """Raise CheckpointError if the checkpoint is of another model or task, so the run cannot continue it."""
    before, now = read_dumped(old), read_dumped(dump_config(config))
    for key in OBJECTIVE:
        there, here = before[key], now[key]
        if (there or None) != (here or None):
            raise CheckpointError(
                f"checkpoint {path} was trained with {key}={as_yaml(there)}, but the config has {as_yaml(here)}. Set "
                f"{key} as it was, or start a new run from its weights (model.weights, another run.directory)"
            )


def changes(old: str, new: str) -> dict[str, str]:
    """Return the keys whose values differ between the configs, except those on resuming and compute.mode.

    A key that an older version's config lacks has its default.
    """
    before, after = read_dumped(old), read_dumped(new)
    # without compute.mode: the keys that a mode sets are compared themselves
    where_and_how = ("run.directory", "run.resume", "compute.mode", "compute.mode_keeps")
    keys = dict.fromkeys((*after, *filter(is_option, before)))
    return {
        key: f"{as_yaml(after.get(key))} (was {as_yaml(before.get(key))})"
        for key in keys
        if after.get(key) != before.get(key) and key not in where_and_how
    }
