"""The learning rate that a range test of the same recipe suggests."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bigbatch.errors import ConfigError
from bigbatch.files import parse_json, read_plain
from bigbatch.trainer.config.kinds import is_option
from bigbatch.trainer.config.sections import RANGE_TEST, READING_KEYS

RANGE_FILE = "range.json"
"""File that `bigbatch tune range` writes into its folder."""
RECIPE_SECTIONS = ("data.", "augment.", "model.", "batch.", "optimizer.")
"""Sections with the keys that change the effect of a learning rate."""
NEUTRAL_KEYS = (
    *(*READING_KEYS, "data.loader", "data.resident_on", "data.max_skipped", "data.max_megapixels"),
    *("data.eval_crop_fraction", "data.eval_flip", "batch.microbatch_size", "batch.virtual_ranks"),
    *("optimizer.sharded", "optimizer.ema_decay", "optimizer.ema_every_steps", "optimizer.ema_warmup"),
)
"""Keys of these sections that do not change it: where and how the run computes, and what it evaluates."""


def suggested_rate(
    values: Mapping[str, Any], *, read_recipe: Callable[[str], Mapping[str, Any]], is_rate_stated: bool
) -> float:
    """Return the rate that the range test in schedule.range_test suggests for an experiment of these values.

    read_recipe: returns the values of a dumped config's text. is_rate_stated: the command line states a rate, too.
    Raises: ConfigError for two rates, and for a file that is no range test, found no rate or has another recipe.
    """
    stated = f"{RANGE_TEST}={values[RANGE_TEST]}"
    if is_rate_stated:
        raise ConfigError(f"{stated} and schedule.base_lr both state the rate: leave one out")
    path = Path(values[RANGE_TEST])
    path = path / RANGE_FILE if path.is_dir() else path
    try:
        found = parse_json(read_plain(str(path)))
        rate, recipe = found["suggested_lr"], _as_json(read_recipe(found["config"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else "it is not a range test"
        raise ConfigError(f"{stated}: {why}; name a {RANGE_FILE} that bigbatch tune range has written") from error
    keys = dict.fromkeys((*values, *filter(is_option, recipe)))
    deciding = [key for key in keys if key.startswith(RECIPE_SECTIONS) and key not in NEUTRAL_KEYS]
    if others := [key for key in deciding if _as_json(values.get(key)) != recipe.get(key)]:
        named = ", ".join(f"{key}={recipe.get(key)} there and {_as_json(values.get(key))} here" for key in others)
        raise ConfigError(f"{stated} is of another recipe, with {named}: repeat bigbatch tune range with this one")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= sys.float_info.max:
        raise ConfigError(
            f"{stated} found no rate, as the loss never fell: repeat it with a larger --to, or more --steps"
        )
    return float(rate)


def _as_json(value: Any) -> Any:
    """Return value as JSON reads it. Raises: TypeError, ValueError or RecursionError if JSON has no form for it."""
    return json.loads(json.dumps(value))
