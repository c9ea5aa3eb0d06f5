"""States of checkpoints that have all fields, for tests of some of them."""

from typing import Any

from bigbatch.trainer.config.file import dump_config
from bigbatch.trainer.config.schema import Config


def state_of(config: Config, *, step: int, **fields: Any) -> dict[str, Any]:
    """The state of a run of this config after so many steps; other fields are empty."""
    optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
    empty = {"model": {}, "in_training": [], "optimizer": optimizer, "precision": {}, "average": {}, "evaluations": []}
    empty |= {"gradient_order": "", "sums": {}, "samples": None, "skipped": {}}
    return {"step": step, "config": dump_config(config), **empty, **fields}
