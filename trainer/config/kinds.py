"""Options of bigbatch's own models, optimizers and schedules: legal values of `options` in each section."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from bigbatch.errors import or_nearest
from bigbatch.trainer.config.fields import (
    ABOVE_ZERO,
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    UP_TO_4096,
    Key,
    conform,
    describe,
    read_keys,
)
from bigbatch.trainer.config.sections import RESNETS


@dataclass(frozen=True, kw_only=True)
class ResNet9Options:
    width: Annotated[int, COUNT] = 64
    """Channels of the first layer."""
    pool_first: bool = True
    """Max-pool before norm and activation, which then compute on a quarter of the pixels."""
    celu_alpha: Annotated[float | None, POSITIVE] = None
    """CELU with this alpha instead of ReLU; null for ReLU."""
    norm_scale: Annotated[float | None, POSITIVE] = None
    """Fix batch norm's scales at this value; null to learn them."""
    logit_scale: Annotated[float, POSITIVE] = 0.125
    """Factor on the logits."""
    whitening_eps: Annotated[float | None, POSITIVE] = None
    """Whiten 3x3 patches of the input, with this added to the variances, before a learned 1x1 convolution; null for no
    whitening."""


@dataclass(frozen=True, kw_only=True)
class ResNetOptions:
    zero_gamma: bool = True
    """Start the last norm scale of every residual block at 0."""
    blurpool: bool = False
    """Blur before every strided convolution but the first (Zhang 2019, arXiv 1904.11486)."""


@dataclass(frozen=True, kw_only=True)
class SGDOptions:
    nesterov: bool = False
    """Nesterov's momentum."""


@dataclass(frozen=True, kw_only=True)
class LARSOptions(SGDOptions):
    trust_coefficient: Annotated[float, POSITIVE] = 0.001
    """LARS eta."""
    eps: Annotated[float, NOT_NEGATIVE] = 0.0
    """Added to the denominator of the trust ratio in lars, of the update in lamb and adamw. In shampoo: lower bound of
    an eigenvalue, as a fraction of the largest."""
    momentum_form: Literal["lr_inside", "lr_outside"] = "lr_inside"
    """lr_inside: the MLPerf reference; lr_outside: NVIDIA's."""


@dataclass(frozen=True, kw_only=True)
class LionOptions:
    betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.99)
    """Decay rates of the running means of gradients and of their squares in lamb and adamw. In lion: of the mean whose
    sign is taken, and of the one that is kept."""


@dataclass(frozen=True, kw_only=True)
class AdamWOptions(LionOptions):
    betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.999)
    eps: Annotated[float, NOT_NEGATIVE] = 1e-8


@dataclass(frozen=True, kw_only=True)
class LAMBOptions(AdamWOptions):
    eps: Annotated[float, NOT_NEGATIVE] = 1e-6


@dataclass(frozen=True, kw_only=True)
class MuonOptions(SGDOptions):
    vector_lr_factor: Annotated[float, POSITIVE] = 1.0
    """Factor on the learning rate of weights that are not matrices (bias, batch norm), which SGD updates."""
    newton_schulz_steps: Annotated[int, UP_TO_4096] = 5
    """Steps of the iteration that makes an update orthogonal."""
    newton_schulz_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of these steps; the source uses bf16, on GPUs."""


@dataclass(frozen=True, kw_only=True)
class ShampooOptions(SGDOptions):
    eps: Annotated[float, NOT_NEGATIVE] = 1e-6
    block_size: Annotated[int, COUNT] = 1024
    """Largest number of rows and of columns in a block of a matrix."""
    root_every_steps: Annotated[int, COUNT] = 10
    """Updates between two computations of the inverse roots."""
    factor_decay: Annotated[float, BELOW_ONE] = 0.95
    """Decay rate of the running means of G Gᵀ and Gᵀ G, in [0, 1)."""


@dataclass(frozen=True, kw_only=True)
class PolynomialOptions:
    power: Annotated[float, POSITIVE] = 2.0
    """Exponent of the polynomial."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    milestone_epochs: Annotated[tuple[float, ...] | None, NOT_NEGATIVE] = None
    """Epochs at which the rate is multiplied by gamma."""
    gamma: Annotated[float, COUNT] = 0.1
    """Factor at each milestone."""


@dataclass(frozen=True, kw_only=True)
class CyclicOptions:
    cycle_epochs: Annotated[float, POSITIVE] = 2.0
    """Length of a cycle, half of it rising and half falling, in epochs."""
    cycle_factor: Annotated[float, ABOVE_ZERO] = 1.0
    """Height of each cycle relative to the one before, in (0, 1]."""


OPTION_CLASSES: dict[str, dict[str, type]] = {
    "model": {"resnet9": ResNet9Options, **dict.fromkeys(RESNETS, ResNetOptions)},
    "optimizer": {
        "lars": LARSOptions,
        "lamb": LAMBOptions,
        "sgd": SGDOptions,
        "adamw": AdamWOptions,
        "lion": LionOptions,
        "muon": MuonOptions,
        "shampoo": ShampooOptions,
    },
    "schedule": {"polynomial": PolynomialOptions, "step": StepOptions, "cyclic": CyclicOptions},
}
"""Section -> name of a model, optimizer or schedule -> its options."""
OPTIONS = {
    section: {name: {key.name: key for key in read_keys(f"{section}.options", holder)} for name, holder in own.items()}
    for section, own in OPTION_CLASSES.items()
}
"""Section -> name of a model, optimizer or schedule -> name of an option -> its key."""
OPTION_KEYS = {str(key): key for own in OPTIONS.values() for keys in own.values() for key in keys.values()}
"""Dotted key -> key of every option above, such as model.options.width."""


OPTION_HOLDERS = tuple(f"{section}.options" for section in OPTIONS)
"""Keys that hold options, which flat_options() replaces by one key for each."""
_OPTION_PREFIXES = tuple(f"{key}." for key in OPTION_HOLDERS)


def is_option(name: str) -> bool:
    """Return whether a dotted key is an option of a model, optimizer or schedule, of bigbatch or another package."""
    return name.startswith(_OPTION_PREFIXES)


def nest_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Collect options under their section: {'model.options.width': 4} -> {'model.options': {'width': 4}}."""
    folded = {name: value for name, value in values.items() if not is_option(name)}
    for name in filter(is_option, values):
        section, key, option = name.split(".", 2)
        folded[f"{section}.{key}"] = {**(folded.get(f"{section}.{key}") or {}), option: values[name]}
    return folded


def flat_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Undo nest_options: return each option under a dotted key, such as model.options.width."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in OPTION_HOLDERS and isinstance(value, Mapping):
            found |= {f"{name}.{option}": each for option, each in value.items()}
        elif name not in OPTION_HOLDERS:
            found[name] = value
    return found


def with_default_options(section: str, name: str, stated: Any) -> Any:
    """Return all options of that model, optimizer or schedule, with defaults; unchanged for another package's."""
    keys = OPTIONS[section].get(name)
    if keys is None or not isinstance(stated, Mapping | None):
        return stated or None
    held = {option: key.default for option, key in keys.items()} | dict(stated or {})
    for option in held.keys() & keys.keys():
        with suppress(TypeError):  # check_options refuses it
            held[option] = conform(held[option], keys[option].kind)
    return held


def check_options(section: str, name: str, stated: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield an error for each unknown option of that model, optimizer or schedule, and each illegal value."""
    keys = OPTIONS[section].get(name, {})
    for option, value in (stated or {}).items():
        named = f"{section}.options.{option}"
        if option not in keys:
            legal = f"takes {', '.join(keys)}" if keys else "takes no options"
            yield f"{named} has no meaning with {section}.name={name}, which {legal}{or_nearest(str(option), keys)}"
            continue
        try:
            held = conform(value, keys[option].kind)
        except TypeError:
            yield f"{named}={value} must be {describe(keys[option].kind)}"
            continue
        yield from check_ranges(named, held, keys[option])


def check_ranges(name: str, value: Any, key: Key) -> Iterator[str]:
    """Yield an error if a number is outside a legal range of key."""
    numbers = () if isinstance(value, str) else value if isinstance(value, tuple) else (value,)
    for legal in key.ranges:
        if value is not None and not all(map(legal.holds, numbers)):
            yield f"{name}={value} must be {legal.legal}"
