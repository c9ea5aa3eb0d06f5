"""Join the job of a config: meet the other ranks, compare configs, read the cluster's tuned table."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import choose_device, connect
from bigbatch.comm.gradients.fusion import DEFAULT_SIZES, PlanSizes
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.errors import ConfigError, UserError
from bigbatch.parts import load
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.file import dump_config
from bigbatch.trainer.config.optimizer import require_hardware
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.machine.host import set_deterministic, set_tf32, set_up_process

if TYPE_CHECKING:
    from bigbatch.comm.rendezvous.regroup import Group
    from bigbatch.comm.tuning.tuned import Tuned

GATHER_TUNED = "bigbatch.comm.tuning.cluster.gather_tuned"
NUMA_NODES = Path("/sys/devices/system/node")


def join_job(
    config: Config, env: ProcessEnv, *, group: "Group | None" = None, device: torch.device | None = None
) -> "tuple[Communicator, Tuned | None]":
    """Meet the other ranks, check that all run the same experiment, and read comm.table. Collective.

    group: the ranks left after a rank failure; env is then that group's, and device the one that this rank has.
    Raises: ConfigError; CommError; TunedError.
    """
    # both raise ConfigError before this rank connects to any other
    accumulation_steps(config.batch, world_size=env.world_size)
    device = device or choose_device(env, backend=config.comm.backend)
    if device.type == "cuda":
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        require_hardware(config.optimizer.precision, capability=capability, device=name)
        set_tf32(config.optimizer.precision == "tf32")
    if config.run.reproducible:
        # until set_up_process, even if a caller or an earlier run has set it: with it, torch makes NCCL groups without
        # NVLS, although sums of integers have the same bits in any order
        set_deterministic(0)
    try:
        communicator = connect(
            backend=config.comm.backend,
            algorithm="native",
            group_size=config.comm.group_size,
            wire_dtype=config.comm.wire_dtype,
            predivide=config.comm.predivide,
            reduce_dtype=config.comm.reduce_dtype,
            buffers=config.comm.buffers,
            interface=config.comm.interface,
            warn_seconds=config.comm.warn_seconds,
            timeout_seconds=config.comm.timeout_seconds,
            meeting_seconds=config.comm.meeting_seconds,
            env=env,
            heals=config.run.heal == "in_place" and not config.compute.cuda_graph,
            group=group,
            device=device,
        )
        communicator.agree("the config", dump_config(config))
        tuned: Tuned | None = None
        if config.comm.table is not None:
            tuned = load(GATHER_TUNED)(Path(config.comm.table), communicator)
        table, source = (tuned.table, f"{config.comm.table}") if tuned else (None, "")
        communicator = communicator.with_algorithm(config.comm.algorithm, table=table, table_from=source)
    except UserError:
        raise
    except ValueError as error:
        raise ConfigError(f"comm: {error}") from error
    set_up_process(
        communicator,
        cudnn_benchmark=config.compute.cudnn_benchmark,
        is_reproducible=config.run.reproducible,
        cpu_threads=config.compute.cpu_threads,
    )
    return communicator, tuned


def bind_rank(config: Config, env: ProcessEnv) -> str | None:
    """Bind this process to cores near its GPU or its memory if data.bind_numa is set; return a line for the log.

    Call it first: the binding holds for threads that start later.
    """
    if not config.data.bind_numa or len([*NUMA_NODES.glob("node[0-9]*")]) < 2:  # with one there is nothing to choose
        return None
    from bigbatch.trainer.machine.numa import bind  # only for this key

    device = choose_device(env, backend=config.comm.backend)
    return bind(device=device, local_rank=env.local_rank, local_size=env.local_size)


def without_choices(config: Config, *, world_size: int) -> Config:
    """Return the config for work without global batch and gradient sums, legal for any number of ranks and cluster."""
    microbatch_size = config.batch.microbatch_size
    batch = replace(
        config.batch,
        global_batch_size=microbatch_size * world_size,
        bn_span=min(config.batch.bn_span, microbatch_size),
        virtual_ranks=None,
    )
    comm = replace(config.comm, algorithm="native", table=None, **asdict(fusion_sizes(config)))
    return replace(config, batch=batch, comm=comm)


def fusion_sizes(config: Config, tuned: "Tuned | None" = None) -> PlanSizes:
    """Return the config's fusion sizes; for null the tuned ones, or DEFAULT_SIZES without a table."""
    comm, others = config.comm, tuned.sizes if tuned else DEFAULT_SIZES
    return PlanSizes(
        comm.threshold_bytes or others.threshold_bytes,
        comm.buffer_bytes or others.buffer_bytes,
        comm.first_buffer_bytes or others.first_buffer_bytes,
    )
