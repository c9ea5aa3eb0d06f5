"""Other names of keys and values: of older releases, and of other trainers."""

from collections.abc import Iterable
from types import NoneType
from typing import Any, get_args

from bigbatch.errors import nearest
from bigbatch.trainer.config.kinds import OPTION_KEYS, OPTIONS

REPLACED_VALUES = {("comm", "wire_dtype", "int8"): "bfloat16", ("run", "loggers", "csv"): None}
"""Section, key and value -> its replacement; None: remove it from a list."""
REMOVED_DEFAULTS = (None, 0.65, 0)
"""Defaults of removed keys, which older run folders state."""
REMOVED = {
    "run.wandb_options": "wandb reads WANDB_PROJECT, WANDB_MODE and so on from the environment",
    "data.hardware_share": "DALI's default, 0.65, applies",
    "run.memory_every_steps": "with run.heal=in_place the remaining ranks hold the state",
    "comm.max_ctas": "NCCL reads NCCL_MAX_CTAS from the environment",
}
"""Removed key -> what replaces it, in the words of an error and a note."""
MOVED = {f"{key.section.partition('.')[0]}.{key.name}": name for name, key in OPTION_KEYS.items()}
"""Keys that became options, such as model.width -> model.options.width."""


def modernize_(content: dict[str, Any], *, is_run: bool) -> list[str]:
    """Move options to their new keys, in the sections of a config; return notes to print.

    is_run: the config is a run folder's, perhaps of an older release: removed keys and values are dropped too.
    """
    lines = []
    sections = {section: values for section, values in content.items() if isinstance(values, dict)}
    for (section, key, old), new in REPLACED_VALUES.items() if is_run else ():
        stated = sections.get(section, {}).get(key)
        if stated == old or (isinstance(stated, list) and old in stated):
            sections[section][key] = new if stated == old else [each for each in stated if each != old]
            lines.append(f"{section}.{key}={old} was removed{f', and {new} replaces it' if new else ''}")
    for section, values in sections.items():
        legal = OPTIONS.get(section, {}).get(str(values.get("name")), {})
        for key in [key for key in values if f"{section}.{key}" in MOVED]:
            value, new = values.pop(key), MOVED[f"{section}.{key}"]
            is_foreign = "name" in values and key not in legal
            if (value is None and is_without_effect(new, name=values.get("name"))) or (is_run and is_foreign):
                continue
            options = values.get("options")
            if options is None or isinstance(options, dict):
                values["options"] = {key: value, **(options or {})}
            lines += [] if is_run else [f"{section}.{key} is {new} now"]
        for name in [f"{section}.{key}" for key in values if is_run and f"{section}.{key}" in REMOVED]:
            value = values.pop(name.partition(".")[2])
            lines += [] if value in REMOVED_DEFAULTS else [f"{name}={value} has no effect: {REMOVED[name]}"]
    if is_run and "compute" in sections:
        sections["compute"].setdefault("mode", "eager")  # a run from before the key was computed as it stated
    return lines


def is_without_effect(option: str, *, name: object) -> bool:
    """Return whether null under an old key states nothing: the option cannot be null, or name does not have it.

    option: its new dotted key. name: the model, optimizer or schedule; None if it is not stated beside the key.
    """
    section, _, own = option.split(".")
    is_missing = name is not None and own not in OPTIONS[section].get(str(name), {})
    return is_missing or NoneType not in get_args(OPTION_KEYS[option].kind)


def rekeyed(value: Any) -> Any:
    """Return the content of a sweep's file, with moved keys renamed at any depth."""
    if isinstance(value, dict):
        return {MOVED.get(name, name) if isinstance(name, str) else name: rekeyed(each) for name, each in value.items()}
    return [rekeyed(each) for each in value] if isinstance(value, list) else value


_OTHER_TRAINERS_OPTIONS = {
    "augment.cutmix_alpha": "cutmix",
    "augment.erasing_probability": "random_erase reprob",
    "augment.mixup_alpha": "mixup",
    "augment.randaugment_ops": "aa auto_augment",
    "batch.bn_span": "sync_bn",
    "batch.global_batch_size": "batch_size",
    "comm.backend": "dist_backend",
    "compute.compile": "torchcompile",
    "data.image_size": "img_size train_crop_size",
    "data.num_threads": "workers num_workers",
    "data.root": "data data_dir data_path",
    "model.name": "arch model",
    "model.weights": "pretrained",
    "optimizer.clip_norm": "clip_grad clip_grad_norm",
    "optimizer.ema_decay": "model_ema model_ema_decay",
    "optimizer.label_smoothing": "smoothing",
    "optimizer.loss": "criterion",
    "optimizer.name": "opt",
    "optimizer.precision": "amp amp_dtype dtype",
    "optimizer.weight_decay": "wd",
    "run.directory": "output output_dir",
    "run.epochs": "num_train_epochs",
    "run.log_every_steps": "log_interval print_freq verbose",
    "run.loggers": "log_wandb logger",
    "schedule.base_lr": "learning_rate lr",
    "schedule.end_lr": "lr_min min_lr",
    "schedule.name": "lr_scheduler sched",
    "schedule.options.gamma": "lr_gamma",
    "schedule.options.milestone_epochs": "lr_step_size",
    "schedule.warmup_epochs": "lr_warmup_epochs",
}
"""Key of bigbatch -> options of PyTorch's ImageNet example, timm's train.py and torchvision's references."""
KEY_OF_OTHER_NAME = {word: key for key, words in _OTHER_TRAINERS_OPTIONS.items() for word in words.split()}

_ACCUMULATION = "it follows from batch.global_batch_size, batch.microbatch_size and the number of ranks"
SET_OUTSIDE_CONFIG = {
    "device": "bigbatch launch ... --device cpu trains on the CPU",
    "evaluate": "bigbatch evaluate RUN does that",
    "gpus": "bigbatch launch local --ranks N says how many",
    "grad_accum_steps": _ACCUMULATION,
    "gradient_accumulation_steps": _ACCUMULATION,
    "local_rank": "bigbatch launch tells each rank its own",
    "nproc_per_node": "bigbatch launch local --ranks N, or --ranks-per-node N with several nodes",
    "test_only": "bigbatch evaluate RUN does that",
    "world_size": "bigbatch launch ... --ranks N says how many",
}
"""Options of these trainers that no key sets -> hint: what sets them in bigbatch."""


def closest_key(name: str, known: Iterable[str]) -> str:
    """Return the known name that was meant, in any section; empty if none is similar."""
    known = list(known)
    last = name.rpartition(".")[2].replace("-", "_")
    if KEY_OF_OTHER_NAME.get(last) in known:
        return KEY_OF_OTHER_NAME[last]
    # then without the section, which may be wrong or missing
    whole = {each: each for each in known} if "." in name else {}
    for words, word in ((whole, name.replace("-", "_")), ({each.rpartition(".")[2]: each for each in known}, last)):
        if near := nearest(word, words):
            return words[near]
    return ""
