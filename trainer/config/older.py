"""Keys and values of older configs, of run folders, files and command lines, and their replacements."""

from types import NoneType
from typing import Any, get_args

from bigbatch.trainer.config.kinds import KINDS, OPTION_KEYS

REPLACED = {
    ("comm", "wire_dtype", "int8"): "bfloat16",
    ("run", "loggers", "csv"): None,
}
"""Section, key and value -> its replacement; None: remove it from a list."""
DEFAULTS = (None, 0.65, 0)
"""Defaults of removed keys, which older run folders state."""
REMOVED = {
    "run.wandb_options": "wandb reads WANDB_PROJECT, WANDB_MODE and so on from the environment",
    "data.hardware_share": "DALI's default, 0.65, holds",
    "run.memory_every_steps": "with run.heal=in_place the ranks that are left hold the state",
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
    for (section, key, old), new in REPLACED.items() if is_run else ():
        stated = sections.get(section, {}).get(key)
        if stated == old or (isinstance(stated, list) and old in stated):
            sections[section][key] = new if stated == old else [each for each in stated if each != old]
            lines.append(f"{section}.{key}={old} is there no more{f', and {new} takes its place' if new else ''}")
    for section, values in sections.items():
        legal = KINDS.get(section, {}).get(str(values.get("name")), {})
        for key in [key for key in values if f"{section}.{key}" in MOVED]:
            value, new = values.pop(key), MOVED[f"{section}.{key}"]
            is_foreign = "name" in values and key not in legal
            if (value is None and says_nothing(new, name=values.get("name"))) or (is_run and is_foreign):
                continue
            options = values.get("options")
            if options is None or isinstance(options, dict):
                values["options"] = {key: value, **(options or {})}
            lines += [] if is_run else [f"{section}.{key} is {new} now"]
        for name in [f"{section}.{key}" for key in values if is_run and f"{section}.{key}" in REMOVED]:
            value = values.pop(name.partition(".")[2])
            lines += [] if value in DEFAULTS else [f"{name}={value} has no effect: {REMOVED[name]}"]
    if is_run and "compute" in sections:
        sections["compute"].setdefault("mode", "eager")  # a run from before the key was computed as it stated
    return lines


def says_nothing(option: str, *, name: object) -> bool:
    """Return whether null under an old key states no option: it did for all models and optimizers but the option's own.

    option: its new dotted key. name: the model, optimizer or schedule; None if it is not stated beside the key.
    """
    section, _, own = option.split(".")
    is_missing = name is not None and own not in KINDS[section].get(str(name), {})
    return is_missing or NoneType not in get_args(OPTION_KEYS[option].kind)


def renamed(value: Any) -> Any:
    """Return what a sweep's file states with moved keys under their new names, at any depth."""
    if isinstance(value, dict):
        return {MOVED.get(name, name) if isinstance(name, str) else name: renamed(each) for name, each in value.items()}
    return [renamed(each) for each in value] if isinstance(value, list) else value
