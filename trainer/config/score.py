"""Which settings of the loss and of own metrics go together."""

from collections.abc import Iterator, Mapping
from typing import Any

from bigbatch.trainer.config.dotted import is_dotted
from bigbatch.trainer.config.sections import OptimizerConfig, RunConfig

CROSS_ENTROPY = "cross_entropy"
ENTRY = ("name", "options")
"""Keys of a metric that has options."""


def check_loss(optimizer: OptimizerConfig, run: RunConfig) -> Iterator[str]:
    """Refuse a name of no form, and settings that mean something for cross-entropy alone, or for others alone."""
    loss, options = optimizer.loss, optimizer.loss_options
    if loss == CROSS_ENTROPY:
        if options is not None:
            yield f"optimizer.loss_options={options} has no meaning with optimizer.loss={loss}: set it to null"
        return
    if not is_dotted(loss):
        yield (
            f"optimizer.loss={loss} is neither {CROSS_ENTROPY} nor the dotted name of a loss: mypackage.losses.Focal "
            "is one"
        )
    if optimizer.label_smoothing:
        yield (
            f"optimizer.label_smoothing={optimizer.label_smoothing} has no meaning with optimizer.loss={loss}: set it "
            "to 0, and let the loss do it by optimizer.loss_options"
        )
    if run.divergence_steps is not None:
        yield (
            f"run.divergence_steps={run.divergence_steps} compares the loss with the cross-entropy of a guess, which "
            f"says nothing of optimizer.loss={loss}: set it to null"
        )


def check_metrics(metrics: Mapping[str, Any] | None) -> Iterator[str]:
    """Refuse entries of no form."""
    for name, entry in (metrics or {}).items():
        if not (isinstance(name, str) and name.isidentifier()):
            yield f"run.metrics: {name!r} is no name of a figure: take letters, digits and _"
            continue
        stated = entry if isinstance(entry, dict) else {"name": entry}
        options = stated.get("options")
        is_known = set(stated) <= set(ENTRY) and (options is None or isinstance(options, dict))
        if not (is_known and isinstance(stated.get("name"), str) and is_dotted(stated["name"])):
            yield (
                f"run.metrics: {name} is {entry!r}, and neither a dotted name, such as mypackage.metrics.Balanced, nor "
                "{name: mypackage.metrics.Balanced, options: {...}}"
            )


def metric_entries(metrics: Mapping[str, Any] | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each metric's own name, its dotted name and its options."""
    for name, entry in (metrics or {}).items():
        stated = entry if isinstance(entry, dict) else {"name": entry}
        yield name, stated["name"], stated.get("options") or {}
