"""The known speedups: changes of a config that keep its update, up to rounding, and when one cannot be measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bigbatch.errors import pip_install
from bigbatch.trainer.config.batch import accumulation_steps, ranks_per_ghost
from bigbatch.trainer.config.batch_remedy import largest_divisor
from bigbatch.trainer.config.checks import RESIDUAL_BLOCKS
from bigbatch.trainer.config.optimizer import CAPABILITY
from bigbatch.trainer.config.schema import Config, try_values
from bigbatch.trainer.config.sections import READERS, SCALED
from bigbatch.trainer.input.loaders import dali

MAX_MICROBATCHES = 8
FEWEST_IMAGES = 2
"""Fewest images of a ghost batch that is cut for a slow machine: statistics need two."""
ROUNDS = "changes rounding: verify accuracy"
RESIZES = "resizes by other code: verify accuracy"
FASTER = {
    # precision: those that may be faster on a GPU
    "fp32": ("tf32", "bf16_autocast", "bf16"),
    "tf32": ("bf16_autocast", "bf16"),
    "bf16_autocast": ("bf16",),
    "fp16_autocast": ("fp16",),
}
FASTER_ON_CPU = {"fp32": ("bf16_autocast", "bf16"), "bf16_autocast": ("bf16",)}
"""The same on a CPU that multiplies bfloat16 itself."""
FASTER_WITHOUT_BF16 = ("fp16_autocast", "fp16")
"""Precisions faster than fp32 on a GPU without bf16."""
HALF = ("bf16", "fp16")
"""Precisions with half-precision gradients, which need no wire_dtype."""
LOSS_SCALE = {"optimizer.loss_scale": 1024.0, "optimizer.loss_scale_growth_steps": 2000}
RECOMPUTED_BLOCKS = 4
SWITCHES = ("layout", "cudnn")
ASSUMED_GAIN: Mapping[bool, Mapping[str, float]] = {
    # on a CPU, where compiled models of the recipes were slower, and on a GPU
    False: {"precision": 0.4, "layout": 0.3, "microbatch": 0.05, "compile": 0.02},
    True: {"precision": 0.8, "layout": 0.3, "graph": 0.15, "cudnn": 0.1, "microbatch": 0.1, "compile": 0.1},
}
"""Whether the device is a GPU -> speedup -> its assumed gain, as a fraction."""
MEASURED_IN_PART = "only a part of the step is measured, which no other size fits"
BUCKET_FACTOR = 4


@dataclass(frozen=True)
class Machine:
    device: str
    device_type: str
    capability: tuple[int, int] | None
    """Compute capability of a CUDA device."""
    num_cores: int
    """Cores that each rank may use."""
    world_size: int
    num_threads: int = 1
    """Threads of torch on each rank."""
    has_cpu_bf16: bool = False
    """The CPU multiplies bfloat16 itself: AVX-512 BF16 or AMX."""

    @property
    def is_gpu(self) -> bool:
        return self.device_type == "cuda"


def part_of_step(config: Config, *, world_size: int) -> Config:
    """Return the config with a global batch of at most MAX_MICROBATCHES microbatches per rank. Raises: ConfigError.

    One rank alone could have 256 of them in a step that many ranks share in a real run.
    """
    steps = accumulation_steps(config.batch, world_size=world_size)
    kept = largest_divisor(steps, MAX_MICROBATCHES)
    if kept == steps:
        return config
    # a divisor of the steps, so that ghost batches still fill the smaller step
    size = world_size * kept * config.batch.microbatch_size
    return replace(config, batch=replace(config.batch, global_batch_size=size, virtual_ranks=None))


def part_of_images(config: Config, num_images: float, *, world_size: int) -> dict[str, Any]:
    """Return values that cut a step to about num_images images per rank; {} if it has no more.

    They state fewer microbatches; if one is too large, a smaller one of whole ghost batches; if a ghost batch is too
    large, a smaller one, too. For measurements only: they change the update.
    """
    batch = config.batch
    size, span, shares = batch.microbatch_size, batch.bn_span, ranks_per_ghost(batch)
    steps = accumulation_steps(batch, world_size=world_size)
    if num_images >= steps * size:
        return {}
    kept = 1
    if num_images >= size:
        kept = largest_divisor(steps, int(num_images // size))
    elif num_images >= span:  # several fit into a microbatch
        size = span * largest_divisor(size // span, int(num_images // span))
    else:
        size = min(size, max(FEWEST_IMAGES, int(num_images)))
        span = size * shares
    return {
        "batch.global_batch_size": world_size * kept * size,
        "batch.microbatch_size": size,
        "batch.bn_span": span,
        "batch.virtual_ranks": None,
    }


@dataclass(frozen=True)
class Candidate:
    """Settings that may be faster and keep the update, up to rounding."""

    name: str
    values: Mapping[str, Any] = field(hash=False)
    note: str = ""


@dataclass(frozen=True)
class Unmeasured:
    """A speedup that cannot be tried on this machine."""

    name: str
    why: str


Candidates = Iterator[Candidate | Unmeasured]


def find_candidates(
    config: Config, machine: Machine, *, full_config: Config, limit: str, only: Sequence[str] = ()
) -> tuple[list[Candidate], list[Unmeasured]]:
    """Return legal candidates, those that may relieve limit first; and the speedups that cannot be measured.

    full_config: has the full global batch; config may have a part of it. only: names to try; empty for all.
    """
    candidates: list[Candidate] = []
    unmeasured: list[Unmeasured] = []
    is_cut = config.batch.microbatch_size != full_config.batch.microbatch_size
    for name in only or SPEEDUPS:
        is_of_part = name == "microbatch" and config.batch != full_config.batch
        for found in SPEEDUPS[name](config, machine):
            if isinstance(found, Unmeasured):
                unmeasured.append(replace(found, why=MEASURED_IN_PART) if is_of_part else found)
                continue
            # legal in the part that is measured, and in the whole config that the advice is for
            changed = [try_values(each, found.values, world_size=machine.world_size) for each in (config, full_config)]
            if illegal := [each for each in changed if isinstance(each, str)]:
                unmeasured.append(Unmeasured(name, MEASURED_IN_PART if is_of_part else illegal[0]))
            elif is_cut and "batch.microbatch_size" in found.values:
                unmeasured.append(Unmeasured(name, MEASURED_IN_PART))
            else:
                candidates.append(found)

    def worth(candidate: Candidate) -> float:
        """Return the assumed gain, used only to try the likeliest first."""
        if candidate.name in SWITCHES and not all(candidate.values.values()):
            return 0.0  # it turns off what the user has on, perhaps for a reason
        return ASSUMED_GAIN[machine.is_gpu].get(candidate.name, 0.0)

    first = {"input": INPUT, "network": NETWORK, "cores": ("threads", *INPUT)}.get(limit, COMPUTE)
    # stable, so that those of equal worth stay in order
    return sorted(candidates, key=lambda each: (each.name not in first, -worth(each))), list(dict.fromkeys(unmeasured))


def _workers(config: Config, machine: Machine) -> Candidates:
    threads, cores = config.data.num_threads, machine.num_cores
    if config.data.loader not in READERS:
        yield Unmeasured("workers", f"data.loader={config.data.loader} reads no images while training")
        return
    more = sorted({number for number in (2 * threads, cores) if threads < number <= cores})
    for number in more:
        yield Candidate("workers", {"data.num_threads": number})
    if not more:
        yield Unmeasured("workers", f"data.num_threads={threads}, and a rank may use {cores} core(s)")


def _prefetch(config: Config, machine: Machine) -> Candidates:
    if config.data.loader in READERS:
        yield Candidate("prefetch", {"data.prefetch_batches": 2 * config.data.prefetch_batches})


def _loader(config: Config, machine: Machine) -> Candidates:
    if config.data.loader != "torchvision":
        return
    if not machine.is_gpu:
        yield Unmeasured("loader", "data.loader=dali decodes on a GPU, and there is none")
    elif not dali.is_installed():
        yield Unmeasured("loader", f"data.loader=dali is not installed: {pip_install('dali')}")
    else:
        yield Candidate("loader", {"data.loader": "dali"}, RESIZES)


def _binding(config: Config, machine: Machine) -> Candidates:
    if not config.data.bind_numa:
        yield Candidate("binding", {"data.bind_numa": True})


def _threads(config: Config, machine: Machine) -> Candidates:
    """Try one thread, which is faster if other ranks, input threads or other processes use the cores."""
    if not machine.is_gpu and machine.num_threads > 1:
        yield Candidate("threads", {"compute.cpu_threads": 1}, ROUNDS)


def _precision(config: Config, machine: Machine) -> Candidates:
    precision = config.optimizer.precision
    if machine.capability is None:
        faster = FASTER_ON_CPU.get(precision, ())
        for name in faster if machine.has_cpu_bf16 else ():
            yield Candidate("precision", {"optimizer.precision": name}, ROUNDS)
        if not machine.has_cpu_bf16:
            yield Unmeasured("precision", "this CPU does not multiply bfloat16 itself, and half precision is slower")
        elif not faster:
            yield Unmeasured("precision", f"this CPU has none that is faster than {precision}")
        return
    has_bf16 = machine.capability >= CAPABILITY["bf16"]
    faster = FASTER.get(precision, ()) if has_bf16 or precision != "fp32" else FASTER_WITHOUT_BF16
    tried = [name for name in faster if machine.capability >= CAPABILITY.get(name, (0, 0))]
    for name in tried:
        scale = LOSS_SCALE if name in SCALED and config.optimizer.loss_scale is None else {}
        yield Candidate("precision", {"optimizer.precision": name, **scale}, ROUNDS)
    if not tried:
        yield Unmeasured("precision", f"{machine.device} has none that is faster than {precision}")


def _layout(config: Config, machine: Machine) -> Candidates:
    yield Candidate("layout", {"compute.channels_last": not config.compute.channels_last}, ROUNDS)


def _cudnn(config: Config, machine: Machine) -> Candidates:
    if machine.is_gpu:
        yield Candidate("cudnn", {"compute.cudnn_benchmark": not config.compute.cudnn_benchmark}, ROUNDS)
    else:
        yield Unmeasured("cudnn", "its search for kernels needs a GPU")


def _compile(config: Config, machine: Machine) -> Candidates:
    now, names = config.compute.compile, ("default", "max-autotune") if machine.is_gpu else ("default",)
    for name in names[names.index(now) + 1 if now in names else 0 :]:
        yield Candidate("compile", {"compute.compile": name}, ROUNDS)


def _graph(config: Config, machine: Machine) -> Candidates:
    if not machine.is_gpu:
        yield Unmeasured("graph", "CUDA graphs need a GPU")
    elif not config.compute.cuda_graph:
        yield Candidate("graph", {"compute.cuda_graph": True})


def _microbatch(config: Config, machine: Machine) -> Candidates:
    """Try sizes that leave the global batch and its ghost batches as they are."""
    size, span = config.batch.microbatch_size, config.batch.bn_span
    share = size * accumulation_steps(config.batch, world_size=machine.world_size)
    # whole ghost batches in each, and whole microbatches in the largest share
    fitting = [each for each in range(span, share + 1, span) if share % each == 0] if span <= size else []
    larger, smaller = [each for each in fitting if each > size][:2], [each for each in fitting if each < size][-1:]
    for each in (*larger, *smaller):
        yield Candidate("microbatch", {"batch.microbatch_size": each}, ROUNDS)
    if not larger:
        yield Unmeasured("microbatch", f"batch.microbatch_size={size} is the largest that leaves the update as it is")


def _recompute(config: Config, machine: Machine) -> Candidates:
    """Try recomputing: it costs time and saves memory, which a larger microbatch may turn into speed."""
    num_blocks = min(RECOMPUTED_BLOCKS, RESIDUAL_BLOCKS.get(config.model.name, 0))
    if not num_blocks or config.compute.recomputed_blocks:
        return
    recomputed = {"compute.recomputed_blocks": num_blocks}
    yield Candidate("recompute", recomputed)
    size = 2 * config.batch.microbatch_size
    if isinstance(try_values(config, {"batch.microbatch_size": size}, world_size=machine.world_size), Config):
        yield Candidate("recompute", {**recomputed, "batch.microbatch_size": size}, ROUNDS)


def _buckets(config: Config, machine: Machine) -> Candidates:
    comm = config.comm
    if machine.world_size == 1:
        yield Unmeasured("buckets", "one rank sums nothing: give --ranks; `bigbatch comm tune` finds the best plan")
    elif comm.threshold_bytes is None or comm.buffer_bytes is None:
        yield Unmeasured("buckets", "they come from comm.table: `bigbatch comm tune` finds the best plan")
    else:
        for factor in (BUCKET_FACTOR, 1 / BUCKET_FACTOR):
            sizes = (max(1, round(each * factor)) for each in (comm.threshold_bytes, comm.buffer_bytes))
            yield Candidate(
                "buckets", dict(zip(("comm.threshold_bytes", "comm.buffer_bytes"), sizes, strict=True)), ROUNDS
            )


def _algorithm(config: Config, machine: Machine) -> Candidates:
    if machine.world_size == 1:
        yield Unmeasured("algorithm", "one rank sums nothing: give --ranks")
    elif config.comm.algorithm == "auto" and machine.is_gpu:
        yield Unmeasured("algorithm", "auto uses NCCL's own here: `bigbatch comm tune` measures the others")
    elif config.comm.algorithm != "native":
        yield Candidate("algorithm", {"comm.algorithm": "native"}, ROUNDS)


def _wire(config: Config, machine: Machine) -> Candidates:
    if machine.world_size > 1 and config.comm.wire_dtype is None and config.optimizer.precision not in HALF:
        yield Candidate("wire", {"comm.wire_dtype": "bfloat16"}, ROUNDS)


INPUT = {"workers": _workers, "prefetch": _prefetch, "loader": _loader, "binding": _binding}
COMPUTE = {
    "threads": _threads,
    "precision": _precision,
    "layout": _layout,
    "cudnn": _cudnn,
    "compile": _compile,
    "graph": _graph,
    "microbatch": _microbatch,
    "recompute": _recompute,
}
NETWORK = {"buckets": _buckets, "algorithm": _algorithm, "wire": _wire}
SPEEDUPS: dict[str, Callable[[Config, Machine], Candidates]] = {**INPUT, **COMPUTE, **NETWORK}
"""Name for --only -> speedup."""
