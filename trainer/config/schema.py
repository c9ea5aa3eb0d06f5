"""What an experiment is: its keys, their defaults, and all checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from bigbatch.errors import ConfigError, nearest
from bigbatch.trainer.config.augment import check_augment, check_image_size
from bigbatch.trainer.config.batch import check_batch
from bigbatch.trainer.config.comm import check_comm
from bigbatch.trainer.config.compute import check_compute, check_cuda_graph
from bigbatch.trainer.config.data import check_loader, check_patience, check_train_sizes
from bigbatch.trainer.config.fields import Key, conform, describe, read_keys
from bigbatch.trainer.config.optimizer import check_optimizer, check_sharded
from bigbatch.trainer.config.precision import check_average, check_precision
from bigbatch.trainer.config.schedule import check_evaluations, check_schedule
from bigbatch.trainer.config.sections import (
    AugmentConfig,
    BatchConfig,
    CommConfig,
    ComputeConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from bigbatch.trainer.config.stopping import check_stopping


@dataclass(frozen=True, kw_only=True)
class Config:
    """Describes one experiment, complete. Raises: ConfigError naming the key, the value and a legal one."""

    run: RunConfig
    data: DataConfig
    augment: AugmentConfig
    model: ModelConfig
    batch: BatchConfig
    compute: ComputeConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    comm: CommConfig

    def __post_init__(self) -> None:
        # first: the checks below divide by these numbers and compare them
        _check_ranges(self)
        check_batch(self.batch)
        check_compute(self.compute, self.batch, model=self.model.name)
        if self.compute.cuda_graph:
            check_cuda_graph(self.optimizer, self.comm)
        check_optimizer(self.optimizer)
        check_sharded(self.optimizer, self.comm)
        _check_choices(self)
        check_loader(self.data)
        check_train_sizes(self.data, epochs=self.run.epochs)
        check_image_size(self.data, self.augment, model=self.model.name)
        check_augment(self.augment, self.batch)
        check_patience(self.data, self.comm)
        check_evaluations(self.run)
        check_schedule(self.schedule, epochs=self.run.epochs)
        check_comm(self.comm)
        check_precision(self.optimizer)
        check_average(self.optimizer)
        check_stopping(self.run, self.data)


SECTIONS: dict[str, type] = get_type_hints(Config)
KEYS = {str(key): key for section, holder in SECTIONS.items() for key in read_keys(section, holder)}
"""Every key of an experiment by its dotted name, in order."""


def all_keys() -> tuple[str, ...]:
    """Return every dotted key of a config, in order."""
    return tuple(KEYS)


def lookup(config: Config, key: str) -> object:
    """Return the value of a dotted key."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def make_config(values: Mapping[str, Any]) -> Config:
    """Build a config of the values of all keys. Raises: ConfigError."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, key in KEYS.items():
        sections[key.section][key.name] = values[name]
    return Config(**{section: holder(**sections[section]) for section, holder in SECTIONS.items()})


def with_defaults(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Give the values of all keys, in order: those stated, and for the others their defaults.

    A key that is for some choices only is null with the others, as long as nobody states it.
    """
    values = {name: stated.get(name, key.default) for name, key in KEYS.items()}
    return {name: None if name not in stated and _is_idle(key, values) else values[name] for name, key in KEYS.items()}


def typed(name: str, value: Any) -> Any:
    """Give the value as the field of that key holds it. Raises: ConfigError."""
    kind = KEYS[name].kind
    try:
        return conform(value, kind)
    except TypeError:
        raise ConfigError(f"{name}={_shown(value)} must be {describe(kind)}") from None


def require_known(name: str, *, known: tuple[str, ...], where: str) -> None:
    """Raise ConfigError for a name that is not known, with the nearest one that is."""
    if name not in known:
        raise ConfigError(f"{where}: unknown key {name}; the nearest legal one is {nearest(name, known)}")


def _shown(value: Any) -> Any:
    return "null" if value is None else value


def _is_idle(key: Key, values: Mapping[str, Any]) -> bool:
    """Tell whether the key has no meaning with the values of the others."""
    return key.only_for is not None and values[key.decider] not in key.only_for.values


def _check_ranges(config: Config) -> None:
    for name, key in KEYS.items():
        value = lookup(config, name)
        numbers = value if isinstance(value, tuple) else (value,)
        for legal in key.ranges:
            if value is not None and not all(map(legal.holds, numbers)):
                raise ConfigError(f"{name}={value} must be {legal.legal}")


def _check_choices(config: Config) -> None:
    values = {name: lookup(config, name) for name in KEYS}
    for name, key in KEYS.items():
        if key.only_for is None:
            continue
        choice = f"{key.decider}={values[key.decider]}"
        if _is_idle(key, values) and values[name] is not None:
            raise ConfigError(f"{name}={values[name]} has no meaning with {choice}: set it to null")
        if not _is_idle(key, values) and values[name] is None and not key.only_for.or_null:
            raise ConfigError(f"{name} is null, but {choice} needs it: give a value")
