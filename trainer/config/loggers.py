"""Which settings of the loggers go together."""

from collections.abc import Iterator

from bigbatch.trainer.config.sections import RunConfig


def check_loggers(run: RunConfig) -> Iterator[str]:
    """Refuse a logger that stands twice."""
    for name in sorted({name for name in run.loggers if run.loggers.count(name) > 1}):
        yield f"run.loggers={list(run.loggers)} has {name} twice: once is enough"
