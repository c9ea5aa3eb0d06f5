"""Check that the settings of digests fit the rest of the run."""

from collections.abc import Iterator

from bigbatch.trainer.config.sections import ComputeConfig, RunConfig


def check_digests(run: RunConfig, compute: ComputeConfig) -> Iterator[str]:
    """Yield an error for layers and values that no digest would record."""
    for name, patterns in (("digest_layers", run.digest_layers), ("digest_values", run.digest_values)):
        if patterns is not None and not run.digest_every_steps:
            yield (
                f"run.{name}={list(patterns)} has no meaning with run.digest_every_steps=0: give the steps between two "
                "records, such as 1"
            )
    if run.digest_layers is None:
        return
    layers = f"run.digest_layers={list(run.digest_layers)}"
    for key, value, remedy in (
        ("compute.compile", compute.compile, "null"),
        ("compute.cuda_graph", compute.cuda_graph or None, "false"),
    ):
        if value is not None:
            yield f"{layers} cannot look into a forward of {key}={value}: set {key} to {remedy}, or the layers to null"
