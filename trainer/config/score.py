"""Check that the settings of the loss and of the user's metrics fit each other."""

from collections.abc import Iterator, Mapping
from typing import Any

from bigbatch.trainer.config.dotted import is_dotted
from bigbatch.trainer.config.sections import OptimizerConfig, RunConfig

CROSS_ENTROPY = "cross_entropy"
ENTRY = ("name", "options")
"""Keys of a metric with options."""


def check_loss(optimizer: OptimizerConfig, run: RunConfig) -> Iterator[str]:
    """Yield an error for a name of unknown form and for settings that do not apply to that loss."""
    loss, options = optimizer.loss, optimizer.loss_options
    if loss == CROSS_ENTROPY:
        if options is not None:
            yield f"optimizer.loss_options={options} has no meaning with optimizer.loss={loss}: set it to null"
        return
    if not is_dotted(loss):
        yield (
            f"optimizer.loss={loss} must be {CROSS_ENTROPY} or the import path of a loss, such as "
            "mypackage.losses.Focal"
        )
    if optimizer.label_smoothing:
        yield (
            f"optimizer.label_smoothing={optimizer.label_smoothing} has no meaning with optimizer.loss={loss}: set it "
            "to 0, and let the loss do it by optimizer.loss_options"
        )
    if run.divergence_steps is not None:
        yield (
            f"run.divergence_steps={run.divergence_steps} compares the loss with the cross-entropy of a guess, which "
            f"does not apply to optimizer.loss={loss}: set it to null"
        )


def check_metrics(metrics: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield an error for each entry of unknown form."""
    for name, entry in (metrics or {}).items():
        if not (isinstance(name, str) and name.isidentifier()):
            yield f"run.metrics: {name!r} is not a legal name of a metric: use letters, digits and _"
            continue
        stated = entry if isinstance(entry, dict) else {"name": entry}
        options = stated.get("options")
        is_known = set(stated) <= set(ENTRY) and (options is None or isinstance(options, dict))
        if not (is_known and isinstance(stated.get("name"), str) and is_dotted(stated["name"])):
            yield (
                f"run.metrics: {name} is {entry!r}: give an import path, such as mypackage.metrics.Balanced, or "
                "{name: mypackage.metrics.Balanced, options: {...}}"
            )


def metric_entries(metrics: Mapping[str, Any] | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each metric's name, import path and options."""
    for name, entry in (metrics or {}).items():
        stated = entry if isinstance(entry, dict) else {"name": entry}
        yield name, stated["name"], stated.get("options") or {}
