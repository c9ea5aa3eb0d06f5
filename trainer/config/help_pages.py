"""Pages of `bigbatch train --help`: one with the keys that most runs state, and those of a section, a key or all."""

import ast
import inspect
import json
import shutil
import textwrap
from collections.abc import Iterator

from bigbatch.errors import ConfigError, or_nearest
from bigbatch.trainer.config import kinds, sections
from bigbatch.trainer.config.fields import Key, describe
from bigbatch.trainer.config.kinds import OPTION_CLASSES, OPTION_KEYS, OPTIONS
from bigbatch.trainer.config.schema import KEYS, SECTIONS

FIRST_KEYS = (
    *("data.root", "data.num_classes", "data.image_size", "data.loader", "run.directory", "run.epochs", "run.resume"),
    *("batch.global_batch_size", "batch.microbatch_size", "optimizer.name", "optimizer.precision", "schedule.base_lr"),
)


def page(topic: str) -> str:
    """Return the keys that most runs state and all sections; else the keys of a section, a key, or all keys.

    Raises: ConfigError for an unknown topic.
    """
    texts, width = dict(_texts()), max(60, shutil.get_terminal_size().columns)
    if not topic:
        lines = [f"  --{key:25}{textwrap.shorten(texts[key], width - 30, placeholder=' ...')}" for key in FIRST_KEYS]
        counts = (f"{name} {sum(key.startswith(f'{name}.') for key in texts)}" for name in SECTIONS)
        all_keys = textwrap.fill(f"all keys by section, for --help SECTION: {', '.join(counts)}", width - 1)
        return "\n".join(("keys that most runs state:", *lines, "", all_keys))
    keys = [key for key in texts if topic == "all" or f"{key}.".startswith(f"{topic}.")]
    if not keys:
        near = or_nearest(topic, (*SECTIONS, *KEYS, *OPTION_KEYS, "all"))
        raise ConfigError(f"--help {topic}: no section or key{near}; sections: {', '.join(SECTIONS)}")
    head = [f"{topic}: {SECTIONS[topic].__doc__}"] if topic in SECTIONS else []
    filled = (f"  --{key}\n{textwrap.indent(textwrap.fill(texts[key], width - 8), ' ' * 6)}" for key in keys)
    return "\n".join((*head, *filled))


def _texts() -> Iterator[tuple[str, str]]:
    """Yield each key and option, in order, with its help."""
    texts = _docstrings()
    for section, holder in SECTIONS.items():
        for key in (key for key in KEYS.values() if key.section == section):
            yield str(key), f"{texts.get((holder.__name__, key.name), '')} ({_describe_key(key)})"
        for key in (key for key in OPTION_KEYS.values() if key.section == f"{section}.options"):
            owners = {name: own[key.name] for name, own in OPTIONS[section].items() if key.name in own}
            classes = (each for name in owners for each in OPTION_CLASSES[section][name].__mro__)
            about = next((texts[found] for each in classes if (found := (each.__name__, key.name)) in texts), "")
            defaults = {name: json.dumps(own.default) for name, own in owners.items()}
            own = ", ".join(f"{each} with {name}" for name, each in defaults.items())
            default = own if len(set(defaults.values())) > 1 else ""
            yield str(key), f"{' '.join(owners)}: {about} ({_describe_key(key, default)})"


def _describe_key(key: Key, default: str = "") -> str:
    default = default or (key.default if isinstance(key.default, str) else json.dumps(key.default))
    if key.only_for is not None and key.default != key.off:
        default += f" with {key.decider} {' or '.join(key.only_for.values)}, else null"
    return f"{describe(key.kind)}; default: {default}"


def _docstrings() -> dict[tuple[str, str], str]:
    """Return (class, field) -> its text in the sources, in one line; empty if there are no sources."""
    try:
        source = "\n".join(map(inspect.getsource, (sections, kinds)))
    except OSError:
        return {}
    return {
        (holder.name, field.target.id): " ".join(text.value.value.split())
        for holder in ast.parse(source).body
        if isinstance(holder, ast.ClassDef)
        for field, text in zip(holder.body, holder.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
