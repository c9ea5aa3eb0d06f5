"""From a config to the objects of a run: with the other build_*.py, the only files that know all parts."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigbatch.comm.algorithms.auto import AUTO
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import choose_device, connect
from bigbatch.comm.gradients.fusion import DEFAULT_SIZES, PlanSizes
from bigbatch.comm.gradients.group_gather import make_group_gather
from bigbatch.comm.gradients.reducer import ExposedTime, GradientReducer, tensor_spec
from bigbatch.comm.rendezvous.environ import ProcessEnv, calibration_folder
from bigbatch.comm.tuning.calibration import calibrate
from bigbatch.comm.tuning.conditions import gather_cluster
from bigbatch.comm.tuning.tuned import Tuned, parse_tuned, read_text
from bigbatch.errors import ConfigError, TunedError, UserError
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.compute import make_execution, memory_format, require_capturable, set_up_compute_
from bigbatch.trainer.build.optimizer import make_optimizer
from bigbatch.trainer.build.score import make_loss
from bigbatch.trainer.config.batch import accumulation_steps, ghosts_per_microbatch, ranks_per_ghost
from bigbatch.trainer.config.file import dump_config
from bigbatch.trainer.config.model import is_foreign_model
from bigbatch.trainer.config.precision import require_hardware
from bigbatch.trainer.config.schedule import decay_epochs
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import BatchConfig
from bigbatch.trainer.machine.energy import make_energy_meter
from bigbatch.trainer.machine.host import set_up_process
from bigbatch.trainer.machine.numa import bind
from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.foreign import make_foreign, require_logits_
from bigbatch.trainer.models.freezing import freeze_
from bigbatch.trainer.models.norm import (
    GhostBatchNorm2d,
    MicrobatchStatistics,
    NormFactory,
    flatten_running_statistics,
)
from bigbatch.trainer.models.spread_norm import RankGroup
from bigbatch.trainer.optim.schedule import Schedule, make_schedule
from bigbatch.trainer.run.weights import digest, load_weights_
from bigbatch.trainer.step.accumulation import WideAccumulation, half_parameters
from bigbatch.trainer.step.divergence import GuessWatch
from bigbatch.trainer.step.ema import MovingAverage, NoAverage, WeightAverage
from bigbatch.trainer.step.loss_scale import Scaling
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.precision import Precision, set_tf32
from bigbatch.trainer.step.seeding import seed_weights
from bigbatch.trainer.step.sharded import shard_update
from bigbatch.trainer.step.statistics import NUM_FLAGS, StepStatistics
from bigbatch.trainer.step.stop_request import StopRequest


def join_job(
    config: Config, env: ProcessEnv, *, kept_calibration: Path | None = None
) -> tuple[Communicator, Tuned | None]:
    """Meet the other ranks, make sure that all run the same experiment, and read what comm.table holds. Collective.

    kept_calibration: the table of a run that may go on, which goes before the user's for this cluster.
    Raises: ConfigError; CommError; TunedError.
    """
    # for its ConfigError, before any rank is connected to
    accumulation_steps(config.batch, world_size=env.world_size)
    _settle_arithmetic(config, choose_device(env, backend=config.comm.backend))
    try:
        communicator = connect(
            backend=config.comm.backend,
            group_size=config.comm.group_size,
            wire_dtype=config.comm.wire_dtype,
            predivide=config.comm.predivide,
            reduce_dtype=config.comm.reduce_dtype,
            max_ctas=config.comm.max_ctas,
            buffers=config.comm.buffers,
            interface=config.comm.interface,
            warn_seconds=config.comm.warn_seconds,
            timeout_seconds=config.comm.timeout_seconds,
            env=env,
        )
        communicator.agree("the config", dump_config(config))
        tuned = gather_tuned(config, communicator)
        communicator = _with_algorithm(config, communicator, tuned, kept_calibration=kept_calibration)
    except UserError:
        raise
    except ValueError as error:
        raise ConfigError(f"comm: {error}") from error
    set_up_process(communicator, cudnn_benchmark=config.compute.cudnn_benchmark)
    return communicator, tuned


def _with_algorithm(
    config: Config, communicator: Communicator, tuned: Tuned | None, *, kept_calibration: Path | None
) -> Communicator:
    comm = config.comm
    if tuned:
        return communicator.with_algorithm(comm.algorithm, table=tuned.table, table_from=f"{comm.table}")
    if not _calibrates(config, communicator):
        return communicator.with_algorithm(comm.algorithm)
    measured = calibrate(
        communicator,
        is_fresh=comm.calibrate == "always",
        interface=comm.interface,
        kept=kept_calibration,
        folder=calibration_folder(),
        buffer_bytes=stated_sizes(config).buffer_bytes,
    )
    communicator = communicator.with_algorithm(comm.algorithm, table=measured.table, table_from=measured.source)
    return replace(communicator, calibration=measured.text)


def _calibrates(config: Config, communicator: Communicator) -> bool:
    """Tell whether a table is wanted: where there is something to choose, for gradients that travel by it."""
    if config.comm.algorithm != AUTO or config.optimizer.sharded or len(communicator.algorithms) == 1:
        return False
    least = {"auto": communicator.topology.num_nodes, "always": communicator.world_size, "never": 1}
    return least[config.comm.calibrate] > 1


def _settle_arithmetic(config: Config, device: torch.device) -> None:
    if device.type == "cuda":
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        require_hardware(config.optimizer.precision, capability=capability, device=name)
        set_tf32(config.optimizer.precision == "tf32")


def bind_rank(config: Config, env: ProcessEnv) -> str | None:
    """Keep this process near its GPU or its memory, where data.bind_numa asks for it; return a line for the log.

    Call it before any other: it holds for threads that start later.
    """
    if not config.data.bind_numa:
        return None
    device = choose_device(env, backend=config.comm.backend)
    return bind(device=device, local_rank=env.local_rank, local_size=env.local_size)


def gather_tuned(config: Config, communicator: Communicator) -> Tuned | None:
    """Return what comm.table holds, as rank 0 reads it, if it is of this cluster; None where there is none. Collective.

    Raises: TunedError, on all ranks alike.
    """
    if config.comm.table is None:
        return None
    path, found = Path(config.comm.table), ""
    if communicator.rank == 0:
        try:
            # one gather carries either: a + before the text, a - before an error
            found = "+" + read_text(path)
        except TunedError as error:
            found = "-" + str(error)
    found = communicator.gather_text(found)[0]
    if found[0] == "-":
        raise TunedError(found[1:])
    tuned = parse_tuned(found[1:], path=path)
    tuned.require_cluster(gather_cluster(communicator), path=path)
    return tuned


def without_choices(config: Config, *, world_size: int) -> Config:
    """Return the config for work that has no global batch and sums no gradients: any number of ranks on any cluster."""
    microbatch_size = config.batch.microbatch_size
    batch = replace(
        config.batch,
        global_batch_size=microbatch_size * world_size,
        bn_span=min(config.batch.bn_span, microbatch_size),
        virtual_ranks=None,
    )
    comm = replace(config.comm, algorithm="native", table=None, **asdict(stated_sizes(config)))
    return replace(config, batch=batch, comm=comm)


def stated_sizes(config: Config, tuned: Tuned | None = None) -> PlanSizes:
    """Return what the config states; the tuned ones where it leaves them to a table, DEFAULT_SIZES without."""
    comm, others = config.comm, tuned.sizes if tuned else DEFAULT_SIZES
    return PlanSizes(
        comm.threshold_bytes or others.threshold_bytes,
        comm.buffer_bytes or others.buffer_bytes,
        comm.first_buffer_bytes or others.first_buffer_bytes,
    )


def make_model(config: Config, communicator: Communicator, *, exposed: ExposedTime | None = None) -> nn.Module:
    """Make the classifier in fp32, on the device, the same weights on every rank. Collective. Raises: ConfigError.

    exposed: counts what training waits for the other ranks of a ghost batch.
    """
    seed_weights(config.run.seed)
    accumulation = accumulation_steps(config.batch, world_size=communicator.world_size)
    norm = partial(
        GhostBatchNorm2d,
        bn_span=config.batch.bn_span,
        ghosts_per_step=accumulation * ghosts_per_microbatch(config.batch),
        group=_rank_group(config.batch, communicator, exposed=exposed or ExposedTime()),
    )
    # drawn on the CPU, whose generator gives the same weights whatever the device
    model = _build_model(config, norm)
    if is_foreign_model(config.model.name):
        require_logits_(model, name=config.model.name, num_classes=config.data.num_classes)
    freeze_(model, config.model.frozen or ())
    return model.to(device=communicator.device, memory_format=memory_format(config.compute))  # type: ignore[call-overload]


def _rank_group(batch: BatchConfig, communicator: Communicator, *, exposed: ExposedTime) -> RankGroup | None:
    """Find the ranks that share a ghost batch with this one; None where it holds its own whole. Collective."""
    num_ranks = ranks_per_ghost(batch)
    if num_ranks == 1:
        return None
    gather = make_group_gather(communicator, group_size=num_ranks, exposed=exposed, what="batch-norm statistics")
    return RankGroup(num_ranks, gather)


def make_plain_model(config: Config, *, weights: Path) -> nn.Module:
    """Make the classifier with those weights, for evaluation: in fp32, on the CPU, with torch's own batch norm.

    Raises: CheckpointError.
    """
    model = _build_model(config, nn.BatchNorm2d)
    load_weights_(model, weights, config=config)
    return model.eval()


def _build_model(config: Config, norm: NormFactory) -> nn.Module:
    model = config.model
    if is_foreign_model(model.name):
        return make_foreign(model.name, num_classes=config.data.num_classes, norm=norm, options=model.options or {})
    options = {
        "width": model.width,
        "pool_first": model.pool_first,
        "celu_alpha": model.celu_alpha,
        "norm_scale": model.norm_scale,
        "logit_scale": model.logit_scale,
        "is_whitened": None if model.whitening_eps is None else True,
        "zero_init_residual": model.zero_gamma,
        "blurpool": model.blurpool,
    }
    stated = {name: value for name, value in options.items() if value is not None}
    return build_model(model.name, num_classes=config.data.num_classes, norm=norm, **stated)


def make_parts(
    config: Config,
    communicator: Communicator,
    *,
    plan: Plan,
    tuned: Tuned | None,
    gradient_order: str | None = None,
) -> Parts:
    """Make all that a step works with. tuned: as join_job gives it; gradient_order: a resumed run's, a name per line.

    model.weights are read for the first step of a run only. Raises: ConfigError; TunedError; CheckpointError;
    ComputeError.
    """
    if config.compute.cuda_graph:
        require_capturable(communicator)
    exposed = ExposedTime()
    model = make_model(config, communicator, exposed=exposed)
    if config.model.weights is not None and plan.first_step == 0:
        # while all is fp32 still: the masters are taken from these
        load_weights_(model, Path(config.model.weights), config=config, new_head=config.model.new_head)
        communicator.agree("the weights in model.weights", f"SHA-256 {digest(model)}")
    precision = make_precision(config, model, device=communicator.device)
    statistics = StepStatistics(flatten_running_statistics(model, num_spare=NUM_FLAGS))
    # before compiling, which takes the norms as it finds them
    MicrobatchStatistics(model, statistics.running_N, microbatches_per_step=plan.accumulation_steps)
    normalize = build_input.make_normalize(config, communicator)
    notes = set_up_compute_(config, model, communicator, normalize=normalize, forward=precision.forward)
    # before the reducer: its hooks come first
    accumulation = WideAccumulation(half_parameters(model) if plan.accumulation_steps > 1 else [])
    is_sharded = config.optimizer.sharded
    reducer = GradientReducer(
        model.named_parameters(),
        communicator,
        order=gradient_order.split("\n") if gradient_order else None,
        learn_order=not is_sharded,  # another layout would give the ranks other shares
        scatter=is_sharded,
        exposed=exposed,
        **_fusion_sizes(config, model, tuned),
    )
    try:
        optimizer = _make_optimizer(config, model, precision, reducer=reducer, communicator=communicator)
        return Parts(
            model=model,
            statistics=statistics,
            precision=precision,
            accumulation=accumulation,
            optimizer=optimizer,
            schedule=_make_schedule(config, plan),
            reducer=reducer,
            communicator=communicator,
            prepare=build_input.make_prepare(config, communicator, normalize=normalize),
            normalize=normalize,
            loss=make_loss(config, communicator.device),
            stop=StopRequest(),
            average=_make_average(config, model, precision),
            energy=make_energy_meter(communicator.device),
            execution=make_execution(config, communicator, optimizer, num_microbatches=plan.accumulation_steps),
            notes=tuple(notes),
        )
    except BaseException:  # where memory ends, hooks would keep what there is of it
        reducer.close()
        raise


def _make_optimizer(
    config: Config, model: nn.Module, precision: Precision, *, reducer: GradientReducer, communicator: Communicator
) -> torch.optim.Optimizer:
    """Make the optimizer over all weights or, if sharded, over the share that this rank's precision then holds."""
    make = partial(make_optimizer, config.optimizer, model, lr=config.schedule.base_lr)
    if not config.optimizer.sharded:
        return make(precision.masters)
    # compiled code and a captured step leave no place to wait within a forward; others' modules may read weights of
    # submodules that they do not call, as MultiheadAttention does
    may_wait = config.compute.compile is None and not config.compute.cuda_graph
    behind_forward = may_wait and not is_foreign_model(config.model.name)
    return shard_update(model, precision, reducer, communicator, make_optimizer=make, behind_forward=behind_forward)


def make_precision(config: Config, model: nn.Module, *, device: torch.device) -> Precision:
    """Make the precision in which a model of that config trains."""
    settings = config.optimizer
    scaling = None
    if settings.loss_scale is not None:
        scaling = Scaling(initial=settings.loss_scale, growth_steps=settings.loss_scale_growth_steps)
    return Precision(model, name=settings.precision, device=device, scaling=scaling, clip_norm=settings.clip_norm)


def _make_average(config: Config, model: nn.Module, precision: Precision) -> WeightAverage:
    """Make the average of the weights and of batch norm's running statistics, which are theirs (docs/decisions/027)."""
    decay, every_steps = config.optimizer.ema_decay, config.optimizer.ema_every_steps
    if decay is None or every_steps is None:
        return NoAverage()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    tensors = {name: t for name, t in precision.model_state().items() if t.is_floating_point() and name not in frozen}
    return MovingAverage(tensors, decay=decay, every_steps=every_steps, on_change=precision.write_half_)


def make_guess_watch(config: Config, plan: Plan) -> GuessWatch | None:
    """Make what ends a run that does no better than a guess; None where the config does not ask for it."""
    if config.run.divergence_steps is None:
        return None
    return GuessWatch(
        steps=config.run.divergence_steps,
        num_classes=config.data.num_classes,
        warmup_steps=_warmup_steps(config, steps_per_epoch=plan.steps_per_epoch),
        first_step=plan.first_step,
    )


def _fusion_sizes(config: Config, model: nn.Module, tuned: Tuned | None) -> dict[str, Any]:
    """Return the config's own sizes, and the tuned ones where it gives none. Raises: TunedError."""
    if tuned is not None:
        tensors = [tensor_spec(name, p) for name, p in model.named_parameters() if p.requires_grad]
        tuned.require_model(tensors, path=Path(str(config.comm.table)))
    return asdict(stated_sizes(config, tuned))


def _make_schedule(config: Config, plan: Plan) -> Schedule:
    schedule = config.schedule
    steps = plan.steps_per_epoch
    milestones = schedule.milestone_epochs
    optional = {
        "end_lr": schedule.end_lr,
        "power": schedule.power,
        "gamma": schedule.gamma,
        "milestones": None if milestones is None else [round(epoch * steps) for epoch in milestones],
        "total_steps": None if schedule.name == "step" else _schedule_steps(config, plan),
    }
    try:
        return make_schedule(
            schedule.name,
            base_lr=schedule.base_lr,
            warmup_steps=_warmup_steps(config, steps_per_epoch=steps),
            **{name: value for name, value in optional.items() if value is not None},
        )
    except ValueError as error:
        raise ConfigError(f"schedule: {error}") from error


def _schedule_steps(config: Config, plan: Plan) -> int:
    """Count the steps of warm-up and decay together."""
    schedule = config.schedule
    # not plan.num_steps, which is less where a run was ended before
    epochs = schedule.warmup_epochs + decay_epochs(schedule, epochs=config.run.epochs)
    return round(epochs * plan.steps_per_epoch)


def _require_reach(config: Config, *, steps_per_epoch: int) -> None:
    """Raise ConfigError for an average that never begins."""
    every_steps, num_steps = config.optimizer.ema_every_steps, steps_per_epoch * config.run.epochs
    if every_steps is not None and every_steps > num_steps:
        raise ConfigError(
            f"optimizer.ema_every_steps={every_steps} exceeds the {num_steps} steps of the run, and would have no "
            f"effect: set it to at most {num_steps}"
        )


def _warmup_steps(config: Config, *, steps_per_epoch: int) -> int:
    return round(config.schedule.warmup_epochs * steps_per_epoch)


def make_plan(config: Config, communicator: Communicator, *, num_samples: int, first_step: int) -> Plan:
    """Work out the numbers of a run. An epoch leaves out what does not fill a global batch. Raises: ConfigError."""
    steps_per_epoch = num_samples // config.batch.global_batch_size
    if steps_per_epoch == 0:
        raise ConfigError(
            f"batch.global_batch_size={config.batch.global_batch_size} exceeds the {num_samples} training pictures"
        )
    if first_step > steps_per_epoch * config.run.epochs:
        raise ConfigError(
            f"run.epochs={config.run.epochs} end at step {steps_per_epoch * config.run.epochs}, but the checkpoint is "
            f"of step {first_step}: give at least {-(-first_step // steps_per_epoch)}, or choose another run.directory"
        )
    _require_reach(config, steps_per_epoch=steps_per_epoch)
    return Plan(
        seed=config.run.seed,
        first_step=first_step,
        num_steps=steps_per_epoch * config.run.epochs,
        steps_per_epoch=steps_per_epoch,
        accumulation_steps=accumulation_steps(config.batch, world_size=communicator.world_size),
        global_batch_size=config.batch.global_batch_size,
        ghosts_per_microbatch=ghosts_per_microbatch(config.batch),
        ranks_per_ghost=ranks_per_ghost(config.batch),
        log_every_steps=config.run.log_every_steps,
        eval_every_steps=steps_per_epoch * config.run.eval_every_epochs,
        eval_offset_steps=steps_per_epoch * config.run.eval_offset_epochs,
        checkpoint_every_steps=config.run.checkpoint_every_steps,
        compare_every_steps=config.run.compare_every_steps,
    )
