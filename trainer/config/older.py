"""Configs of older run folders: removed keys and values, and their replacements."""

from typing import Any

from bigbatch.trainer.config.kinds import KINDS, OPTION_KEYS

REPLACED = {
    ("comm", "wire_dtype", "int8"): "bfloat16",
    ("run", "loggers", "csv"): None,
}
"""Section, key and value -> its replacement; None: remove it from a list."""
REMOVED = {
    "run.wandb_options": "wandb reads WANDB_PROJECT, WANDB_MODE and so on from the environment",
    "data.hardware_share": "DALI's default, 0.65, holds",
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
        for key in [key for key in values if f"{section}.{key}" in MOVED]:
            value = values.pop(key)
            # a run folder's states null for other models, or what says nothing there
            if value is not None and not (is_run and key not in KINDS[section].get(str(values.get("name")), {})):
                values["options"] = {**(values.get("options") or {}), key: value}
                lines += [] if is_run else [f"{section}.{key} is {section}.options.{key} now"]
        for key in [key for key in values if is_run and f"{section}.{key}" in REMOVED]:
            del values[key]
    return lines
