"""Which settings of the loggers go together."""

from collections.abc import Iterator

from bigbatch.trainer.config.sections import RunConfig

WANDB_OPTIONS = ("project", "entity", "group", "name", "job_type", "tags", "notes", "mode")
MODES = ("online", "offline")


def check_loggers(run: RunConfig) -> Iterator[str]:
    """Refuse a logger that stands twice, and arguments of wandb that it has not, or that nothing reads."""
    for name in sorted({name for name in run.loggers if run.loggers.count(name) > 1}):
        yield f"run.loggers={list(run.loggers)} has {name} twice: once is enough"
    options = run.wandb_options
    if options is None:
        return
    if "wandb" not in run.loggers:
        yield f"run.wandb_options={options} has no meaning without wandb in run.loggers: set it to null, or add wandb"
    if unknown := [name for name in options if name not in WANDB_OPTIONS]:
        yield f"run.wandb_options has {unknown[0]!r}, which is none of {', '.join(WANDB_OPTIONS)}"
    if "mode" in options and options["mode"] not in MODES:
        yield f"run.wandb_options: mode is {options['mode']!r}, and must be one of {', '.join(MODES)}"
