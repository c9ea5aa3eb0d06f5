"""Build all parts of a training step from a config; only this room imports them all."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.exposed_time import ExposedTime
from bigbatch.comm.gradients.reducer import GradientReducer, tensor_spec
from bigbatch.comm.gradients.same_start import Start
from bigbatch.errors import ConfigError
from bigbatch.parts import load
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.compute import logits_of_noise, make_graphs, make_loss, require_capturable, set_up_compute_
from bigbatch.trainer.build.job import fusion_sizes
from bigbatch.trainer.build.model import make_model, require_sizes
from bigbatch.trainer.build.optimizer import make_optimizer
from bigbatch.trainer.build.plan import make_momentum_of, make_schedule_of
from bigbatch.trainer.config.batch import ranks_per_ghost
from bigbatch.trainer.config.checks import is_foreign_model
from bigbatch.trainer.config.optimizer import WHOLE_MATRIX, is_foreign
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.machine.gpu_driver import EnergyMeter
from bigbatch.trainer.models.norm import MicrobatchStatistics, flatten_running_statistics
from bigbatch.trainer.step.plan import NO_METER, Parts, Plan
from bigbatch.trainer.step.precision import Precision
from bigbatch.trainer.step.statistics import StepStatistics

if TYPE_CHECKING:
    from bigbatch.comm.gradients.grid import Grid
    from bigbatch.comm.tuning.tuned import Tuned
    from bigbatch.trainer.optim.two_weights import TwoWeights
    from bigbatch.trainer.step.accumulation import WideAccumulation
    from bigbatch.trainer.step.ema import MovingAverage

ACCUMULATION = "bigbatch.trainer.step.accumulation.accumulate_wide"


def make_parts(
    config: Config,
    communicator: Communicator,
    *,
    plan: Plan,
    tuned: "Tuned | None",
    gradient_order: str | None = None,
    classes: Sequence[str] | None = None,
    train: build_input.Split | None = None,
    is_restored: bool = False,
) -> Parts:
    """Return all parts of a step. tuned: as join_job returns it; gradient_order: a resumed run's, a name per line.

    model.weights are read for the first step of a run only. classes: class names of the data, which the weights must
    share if their last layer is taken; None: not compared. train: as for make_loss. is_restored: a state is loaded
    next, so the ranks do not compare initial weights. Raises: ConfigError; TunedError; CheckpointError; ComputeError.
    """
    if config.compute.cuda_graph:
        require_capturable(communicator.transport)
    exposed, is_on_gpu = ExposedTime(), communicator.device.type == "cuda"
    model = make_model(config, communicator, exposed=exposed)
    # while all weights are still fp32: the masters are copies of these
    notes: list[str] = []
    is_compiled = False
    if config.model.weights is not None and not plan.first_step:
        notes = _load_weights_(config, model, communicator, config.model.weights, classes)
    precision = make_precision(config, model, device=communicator.device)
    grid = _make_grid(config, plan) if config.run.reproducible else None
    # before compiling, which captures the norms as they are at that time
    statistics = _make_statistics(model, plan, is_on_grid=grid is not None)
    normalize = build_input.make_normalize(config, communicator)
    logits = partial(logits_of_noise, model, normalize=normalize, forward=precision.forward)
    if config.data.train_sizes:
        require_sizes(config, model, logits=logits)
    if config.compute.compile is not None or config.compute.recomputed_blocks:
        failures = set_up_compute_(config, model, communicator, logits=logits)
        is_compiled, notes = config.compute.compile is not None and not failures, [*notes, *failures]
    # before the reducer, whose hooks run after its hooks
    accumulation = _make_accumulation(model, plan, grid, precision)
    reducer = _make_reducer(
        config,
        model,
        communicator,
        grid=grid,
        exposed=exposed,
        tuned=tuned,
        gradient_order=gradient_order,
        weights="unchecked" if is_restored else "equal",
    )
    try:
        optimizer = _make_optimizer(config, model, precision, reducer=reducer, communicator=communicator)
        schedule = make_schedule_of(config, plan)
        return Parts(
            model=model,
            statistics=statistics,
            precision=precision,
            accumulation=accumulation,
            optimizer=optimizer,
            schedule=schedule,
            momentum=None if config.schedule.low_momentum is None else make_momentum_of(config, schedule),
            reducer=reducer,
            communicator=communicator,
            prepare=build_input.make_prepare(config, communicator, normalize=normalize),
            normalize=normalize,
            loss=make_loss(config, communicator.device, train=train),
            average=None if config.optimizer.ema_decay is None else _make_average(config, model, precision),
            two_weights=_two_weights(optimizer) if is_foreign(config.optimizer.name) else None,
            take_joules=EnergyMeter(communicator.device).take_joules if is_on_gpu else NO_METER,
            graphs=make_graphs(communicator.transport, optimizer) if config.compute.cuda_graph else None,
            is_compiled=is_compiled,
            notes=tuple(notes),
        )
    except BaseException:  # if memory runs out, the reducer's hooks would keep tensors alive
        reducer.close()
        raise


def can_keep_parts(config: Config) -> bool:
    """Return whether parts can be used in another group: not if ranks share weights, or the model's ghost batches.

    Nor if the model is compiled: whether it could be is agreed by the ranks that make their parts together.
    """
    is_shared = config.optimizer.sharded or ranks_per_ghost(config.batch) > 1
    return not is_shared and config.compute.compile is None


def regroup_parts(
    parts: Parts, config: Config, communicator: Communicator, *, plan: Plan, gradient_order: str | None
) -> Parts:
    """Return the parts for another group: model, masters and optimizer stay, with their state. Collective.

    Closes the former parts. The arguments are as for make_parts.
    """
    parts.close()
    parts.model.zero_grad()  # the former reducer's buffers may be in memory that ranks shared
    parts.statistics.start_over()
    grid, exposed = _make_grid(config, plan) if config.run.reproducible else None, ExposedTime()
    with ExitStack() as failure:  # if a rank is lost meanwhile, the model must be without their hooks
        # before the reducer, as in make_parts
        accumulation = _make_accumulation(parts.model, plan, grid, parts.precision)
        if accumulation:
            failure.callback(accumulation.close)
        reducer = _make_reducer(
            config,
            parts.model,
            communicator,
            grid=grid,
            exposed=exposed,
            tuned=None,
            gradient_order=gradient_order,
            weights="unchecked",
        )
        failure.callback(reducer.close)
        _divide_work_(parts.optimizer, communicator, config)
        failure.pop_all()
    return replace(parts, communicator=communicator, accumulation=accumulation, reducer=reducer)


def _load_weights_(
    config: Config, model: nn.Module, communicator: Communicator, weights: str, classes: Sequence[str] | None
) -> list[str]:
    """Load model.weights; return lines for the log. Collective. Raises: CheckpointError."""
    stated = config.model
    from bigbatch.trainer.checkpoint.class_names import require_same_names
    from bigbatch.trainer.checkpoint.weights import digest, load_weights_

    taken = load_weights_(model, Path(weights), config=config, new_head=stated.new_head, partial=stated.partial_weights)
    communicator.agree("the weights in model.weights", f"SHA-256 {digest(model)}")
    notes = [taken.note] if taken.note else []
    if classes is None or not taken.has_head:
        return notes
    if taken.classes is None:
        return [*notes, f"{weights} keeps no class names: those of {config.data.root} are not compared"]
    require_same_names(
        taken.classes,
        classes,
        source=f"model.weights={weights}",
        root=config.data.root,
        remedy="Set model.new_head=true to train a new last layer, or name data of the same classes",
    )
    return notes


def _make_grid(config: Config, plan: Plan) -> "Grid":
    """Return the grid of run.reproducible, with room for a step's microbatches and its loss scale."""
    from bigbatch.comm.gradients.grid import FRACTION_BITS, Grid

    scale_bits = round(math.log2(config.optimizer.loss_scale or 1.0))
    return Grid(plan.division.num_microbatches, fraction_bits=FRACTION_BITS - scale_bits)


def _make_statistics(model: nn.Module, plan: Plan, *, is_on_grid: bool) -> StepStatistics:
    """Return the object that sums batch norm's statistics: each forward of model adds to it from now on.

    Raises: ConfigError for a grid and a model with other state.
    """
    kind = StepStatistics
    if is_on_grid:
        from bigbatch.trainer.step.reproducible import GridStatistics, refuse_own_state

        kind = GridStatistics
    statistics = kind(flatten_running_statistics(model), microbatches=plan.division.num_microbatches)
    MicrobatchStatistics(model, statistics.running_N, take=statistics.take_, unseen=statistics.unseen)
    if is_on_grid:
        refuse_own_state(model)
    return statistics


def _make_accumulation(
    model: nn.Module, plan: Plan, grid: "Grid | None", precision: Precision
) -> "WideAccumulation | None":
    # a grid adds microbatches exactly; masters apart: some weights, and so their gradients, are in half precision
    adds_up = plan.division.most > 1 and not grid and precision.weights.are_apart
    return load(ACCUMULATION)(model) if adds_up else None


def _make_reducer(
    config: Config,
    model: nn.Module,
    communicator: Communicator,
    *,
    grid: "Grid | None",
    exposed: ExposedTime,
    tuned: "Tuned | None",
    gradient_order: str | None,
    weights: Start,
) -> GradientReducer:
    """Return the reducer of the model's gradients. Raises: TunedError if they are not those of the tuned table."""
    if tuned is not None:
        tensors = [tensor_spec(name, p) for name, p in model.named_parameters() if p.requires_grad]
        tuned.require_model(tensors, path=Path(str(config.comm.table)))
    is_sharded = config.optimizer.sharded
    return GradientReducer(
        model.named_parameters(),
        communicator,
        order=gradient_order.split("\n") if gradient_order else None,
        learn_order=not is_sharded,  # another layout would give the ranks other shares
        scatter=is_sharded,
        grid=grid,
        exposed=exposed,
        weights=weights,
        **asdict(fusion_sizes(config, tuned)),
    )


def _make_optimizer(
    config: Config, model: nn.Module, precision: Precision, *, reducer: GradientReducer, communicator: Communicator
) -> torch.optim.Optimizer:
    """Return the optimizer over all weights or, if sharded, over this rank's share."""

    def make(masters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        optimizer = make_optimizer(config.optimizer, model, masters, lr=config.schedule.base_lr)
        _divide_work_(optimizer, communicator, config)
        return optimizer

    if not config.optimizer.sharded:
        return make(precision.masters)
    # compiled code and a captured step cannot wait within a forward; modules of other packages may read weights of
    # submodules that they do not call, as MultiheadAttention does
    may_wait = config.compute.compile is None and not config.compute.cuda_graph
    behind_forward = may_wait and not is_foreign_model(config.model.name)
    from bigbatch.trainer.step.sharded import shard_update

    return shard_update(model, precision, reducer, communicator, make_optimizer=make, behind_forward=behind_forward)


def _divide_work_(optimizer: torch.optim.Optimizer, communicator: Communicator, config: Config) -> None:
    if config.optimizer.name in WHOLE_MATRIX:
        from bigbatch.trainer.optim.divided_work import DividedWork

        matrices: Any = optimizer
        matrices.divide = DividedWork(communicator, one_by_one=config.run.reproducible)


def make_precision(config: Config, model: nn.Module, *, device: torch.device) -> Precision:
    settings = config.optimizer
    scaling = None
    if settings.loss_scale is not None:
        from bigbatch.trainer.step.loss_scale import Scaling

        scaling = Scaling(initial=settings.loss_scale, growth_steps=settings.loss_scale_growth_steps)
    try:
        return Precision(model, name=settings.precision, device=device, scaling=scaling, clip_norm=settings.clip_norm)
    except ValueError as error:
        raise ConfigError(f"model.name={config.model.name}: {error}") from error


def _two_weights(optimizer: torch.optim.Optimizer) -> "TwoWeights | None":
    """Return the sets of weights of an optimizer of another package that has two, else None."""
    from bigbatch.trainer.optim.two_weights import TwoWeights, has_modes

    return TwoWeights(optimizer) if has_modes(optimizer) else None


def _make_average(config: Config, model: nn.Module, precision: Precision) -> "MovingAverage":
    """Return the average of weights and batch norm's running statistics (docs/decisions/027)."""
    decay, every_steps = config.optimizer.ema_decay, config.optimizer.ema_every_steps
    assert decay is not None
    assert every_steps is not None
    from bigbatch.trainer.step.ema import MovingAverage

    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    # not other buffers, such as masks of -inf and unit vectors
    tensors = {
        name: tensor
        for name, tensor in precision.model_state().items()
        if name in trained or name.endswith(("running_mean", "running_var"))
    }
    steps, change, warms_up = every_steps, precision.write_half_, config.optimizer.ema_warmup
    return MovingAverage(tensors, decay=decay, every_steps=steps, on_change=change, warms_up=warms_up)
