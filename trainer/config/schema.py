"""The config of an experiment: its keys, their defaults, and all checks."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, get_type_hints

from bigbatch.errors import ConfigError, Refusals
from bigbatch.paths import PathError, expand_path
from bigbatch.trainer.config import checks, optimizer
from bigbatch.trainer.config.batch import accumulation_steps, check_batch
from bigbatch.trainer.config.fields import Key, ambiguous, conform, describe, read_keys
from bigbatch.trainer.config.kinds import OPTION_KEYS, OPTIONS, check_ranges, nest_options, with_default_options
from bigbatch.trainer.config.schedule import check_momentum, check_schedule, check_schedule_name
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
from bigbatch.trainer.config.strict_yaml import as_yaml, parse_yaml, plain_form


@dataclass(frozen=True, kw_only=True)
class Config:
    """Describes one experiment, complete. Raises: ConfigError with a line for each refusal: key, value, a legal one."""

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
        # check single values first: the other checks divide by these numbers and compare them
        alone = [refusal for name in KEYS for refusal in _check_value(name, lookup(self, name))]
        if refusals := alone or list(_check_together(self)):
            raise ConfigError(*refusals)


SECTIONS: dict[str, type] = get_type_hints(Config)
KEYS = {str(key): key for section, holder in SECTIONS.items() for key in read_keys(section, holder)}
"""All keys of an experiment in order, by names such as optimizer.name."""
_GETTERS = {name: attrgetter(name) for name in KEYS}


def lookup(config: Config, key: str) -> object:
    """Return the value of a dotted key or of an option; None for an option that is not stated."""
    if key in _GETTERS:
        return _GETTERS[key](config)
    holder, name, option = key.split(".", 2)
    return (getattr(getattr(config, holder), name) or {}).get(option)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the config overlaid with these values by dotted key. Raises: ConfigError if they are illegal."""
    return make_config(with_defaults(overlay({name: lookup(config, name) for name in KEYS}, values)))


def try_values(config: Config, values: Mapping[str, Any], *, world_size: int) -> Config | str:
    """Return the config with these values by dotted key; or the reason why it is not legal."""
    try:
        changed = with_values(config, values)
        accumulation_steps(changed.batch, world_size=world_size)
    except ConfigError as error:
        return str(error)
    return changed


def make_config(values: Mapping[str, Any]) -> Config:
    """Build a config from the values of all keys. Raises: ConfigError."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, key in KEYS.items():
        sections[key.section][key.name] = values[name]
    return Config(**{section: holder(**sections[section]) for section, holder in SECTIONS.items()})


def with_defaults(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all keys, in order: stated values, and defaults for the others.

    A key that applies to some choices only is off with the others, unless it is stated.
    """
    stated = nest_options(stated)
    values = {name: stated.get(name, key.default) for name, key in KEYS.items()}
    for section in OPTIONS:
        options = f"{section}.options"
        values[options] = with_default_options(section, values[f"{section}.name"], values[options])
    return {
        name: key.off if name not in stated and is_idle(key, values) else values[name] for name, key in KEYS.items()
    }


def overlay(stated: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return stated overridden by later, both by dotted key.

    Options are merged. If later makes another choice, such as another optimizer, keys and options that apply to the
    former choice only are dropped.
    """
    later = nest_options(later)
    values = with_defaults({**stated, **later})
    changed = {name for name, value in later.items() if value != stated.get(name, KEYS[name].default)}
    kept = {
        name: value
        for name, value in stated.items()
        if not (KEYS[name].decider in changed and is_idle(KEYS[name], values))
    }
    for section in OPTIONS:
        options, name = f"{section}.options", f"{section}.name"
        if name in changed and (own := kept.pop(options, None)):
            shared = own.keys() & OPTIONS[section].get(values[name], {}).keys()
            kept |= {options: {option: own[option] for option in own if option in shared}} if shared else {}
        if kept.get(options) and later.get(options):
            later[options] = {**kept[options], **later[options]}
    return {**kept, **later}


def typed(name: str, value: Any) -> Any:
    """Return the value in the type of that key's field, with a path expanded.

    An option of another package is unchanged. Raises: ConfigError, also for a number out of range.
    """
    key = key_of(name)
    if key is None:
        return value
    kind = key.kind
    try:
        held = conform(value, kind)
    except TypeError:
        shown = value if isinstance(value, str) else as_yaml(value)
        raise ConfigError(f"{name}={shown} must be {describe(kind)}{_plain_form_hint(value, kind)}") from None
    if key.is_path and isinstance(held, str):
        if not held:
            raise ConfigError(f"{name}='' is an empty path: a variable behind it may have no value")
        try:
            held = expand_path(held)
        except PathError as error:
            raise ConfigError(f"{name}={error}") from None
    if refusals := list(_check_value(name, held)):
        raise ConfigError(*refusals)
    return held


def require_known(
    name: str, *, known: tuple[str, ...], where: str, refusals: Refusals, listing: str = "bigbatch train --help all"
) -> None:
    """Refuse an unknown name; the error gives the nearest known one, else the command that lists all."""
    if name not in known:
        from bigbatch.trainer.config.names import SET_OUTSIDE_CONFIG, closest_key  # only for this error

        near = closest_key(name, (*known, *OPTION_KEYS) if "run.seed" in known else known)
        hint = f"the nearest legal one is {near}" if near else f"{listing} lists all"
        hint = SET_OUTSIDE_CONFIG.get(name.replace("-", "_"), hint)
        with refusals.collect(near):
            raise ConfigError(f"{where}: unknown key {name}; {hint}")


def key_of(name: str) -> Key | None:
    """Return the key or option of that name, such as optimizer.name; None for an option of another package."""
    return KEYS.get(name) or OPTION_KEYS.get(name)


def _plain_form_hint(value: Any, kind: Any) -> str:
    """Return the end of an error, such as '; write 10 for 010'; empty if another form does not help."""
    if isinstance(value, dict) and (odd := next(ambiguous(value), None)):
        return f"; {odd} is text here but not in YAML 1.1: put text in quotes, or write the value that you mean"
    plain = plain_form(value) if isinstance(value, str) else ""
    with suppress(TypeError):
        conform(parse_yaml(plain), kind)
        return f"; write {plain} for {value}" if plain else ""
    return ""


def describe_step(*, compiles: bool, has_graph: bool) -> str:
    """Return how steps are computed, such as: compiled, CUDA graph."""
    return ", ".join(["compiled"] * compiles + ["CUDA graph"] * has_graph) or "eager"


def is_idle(key: Key, values: Mapping[str, Any]) -> bool:
    """Return whether the key has no meaning with these values of all keys."""
    return key.only_for is not None and not key.only_for.applies(values[key.decider])


def _check_value(name: str, value: Any) -> Iterator[str]:
    if key := key_of(name):
        yield from check_ranges(name, value, key)
    if name in NAME_CHECKS:
        yield from NAME_CHECKS[name](value)


NAME_CHECKS = {
    "optimizer.name": optimizer.check_optimizer_name,
    "data.loader": checks.check_loader_name,
    "data.root": checks.check_root,
    "model.name": checks.check_model_name,
    "schedule.name": check_schedule_name,
}
"""Key -> what yields an error for a name of unknown form."""


def _check_together(config: Config) -> Iterator[str]:
    run, data, batch = config.run, config.data, config.batch
    yield from check_batch(batch)
    yield from checks.check_compute(config.compute, batch, model=config.model.name)
    if config.compute.cuda_graph:
        yield from checks.check_cuda_graph(config.optimizer, config.comm)
    yield from checks.check_model(config.model)
    yield from optimizer.check_optimizer(config.optimizer)
    if config.optimizer.sharded:
        yield from optimizer.check_sharded(config.optimizer, config.comm)
    yield from _check_choices(config)
    yield from checks.check_loader(data)
    if data.train_sizes is not None:
        yield from checks.check_train_sizes(data.train_sizes, epochs=run.epochs)
    yield from checks.check_image_size(data, config.augment, model=config.model.name)
    if config.augment != AugmentConfig():
        yield from checks.check_augment(config.augment, batch)
    yield from checks.check_patience(data, config.comm)
    yield from check_schedule(config.schedule, epochs=run.epochs)
    if (low := config.schedule.low_momentum) is not None:
        yield from check_momentum(low, config.schedule, config.optimizer, config.compute)
    yield from checks.check_comm(config.comm)
    if run.reproducible:
        yield from checks.check_reproducible(batch, config.compute, config.comm)
    if run.digest_layers is not None or run.digest_values is not None:
        yield from checks.check_digests(run, config.compute)
    if run.audit_every_steps:
        yield from checks.check_audits(run, config.compute)
    if run.noise_scale_every_steps:
        yield from checks.check_noise_scale(run, batch, config.compute)
    yield from checks.check_run(run, data)
    if config.optimizer.loss != optimizer.CROSS_ENTROPY:
        yield from optimizer.check_loss(config.optimizer, run)
    elif (options := config.optimizer.loss_options) is not None:
        yield from optimizer.check_class_weights(options, num_classes=data.num_classes)
    if run.metrics:
        yield from optimizer.check_entries("run.metrics", run.metrics, kind="metric", example=optimizer.METRIC)
    if own := config.augment.custom:
        yield from optimizer.check_entries("augment.custom", own, kind="augmentation", example="mypackage.augment.Blur")


def _check_choices(config: Config) -> Iterator[str]:
    values = {name: lookup(config, name) for name in KEYS}
    for name, key in KEYS.items():
        if key.only_for is None:
            continue
        choice = f"{key.decider}={values[key.decider]}"
        if is_idle(key, values) and values[name] != key.off:
            yield f"{name}={values[name]} has no meaning with {choice}: set it to {as_yaml(key.off)}"
        if not is_idle(key, values) and values[name] is None and not key.only_for.or_null:
            yield f"{name} is null, but {choice} needs it: give a value"
