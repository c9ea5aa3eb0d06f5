"""Check the settings of the loggers."""

from collections.abc import Iterator

from bigbatch.trainer.config.sections import RunConfig


def check_loggers(run: RunConfig) -> Iterator[str]:
    """Yield an error for a logger that is listed twice."""
    for name in sorted({name for name in run.loggers if run.loggers.count(name) > 1}):
        yield f"run.loggers={list(run.loggers)} has {name} twice: once is enough"
