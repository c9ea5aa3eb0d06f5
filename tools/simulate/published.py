"""Published figures: steps that the simulator was compared with, power, and the epochs that a batch needs. Pure."""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PublishedStep:
    """A published step, with its number of devices and images of each."""

    system: str
    model: str
    num_devices: int
    local_batch: int
    milliseconds: float


PUBLISHED_STEPS = (
    # the largest and the smallest batches of each system and model; docs/simulate-errors.md has the errors
    PublishedStep("P40 over RoCE, Jia et al. 2018", "resnet50", 2048, 32, 225.1),
    PublishedStep("V100 of DGX-2H, MLPerf v0.6", "resnet50", 1536, 39, 36.63),
    PublishedStep("V100 of DGX-1, MLPerf v0.6", "resnet50", 1040, 52, 47.26),
    PublishedStep("V100 of DGX-2H, MLPerf v0.7", "resnet50", 512, 65, 52.78),
    PublishedStep("V100, NGC PyTorch mixed precision, DLPerf", "resnet50", 32, 256, 363.3),
    PublishedStep("V100 of C4140, MLPerf v0.7", "resnet50", 16, 208, 150.2),
    PublishedStep("A100, MLPerf v0.7", "resnet50", 768, 45, 27.46),
    PublishedStep("A100, MLPerf v2.0", "resnet50", 64, 51, 19.47),
    PublishedStep("A100, MLPerf v1.0", "resnet50", 64, 204, 65.71),
    PublishedStep("A100 of XE8545, MLPerf v2.0", "resnet50", 8, 408, 122.1),
    PublishedStep("H100, MLPerf v4.0", "resnet50", 64, 50, 10.20),
    PublishedStep("H100 of XE8640, MLPerf v3.1", "resnet50", 8, 408, 60.01),
    PublishedStep("P40 over TCP, Azure", "resnet101", 32, 64, 955.4),
    PublishedStep("P40 over TCP, Azure", "resnet152", 32, 64, 1292.4),
    PublishedStep("P40 over TCP, Azure", "mobilenet_v2", 32, 64, 105.3),
    PublishedStep("V100, PyTorch's DDP page", "resnext50", 16, 32, 157.6),
    PublishedStep("V100, PyTorch's DDP page", "resnext101", 16, 32, 450.0),
    PublishedStep("K80 with parameter servers, EC2", "inception_v3", 128, 64, 2457.7),
)


@dataclass(frozen=True)
class PublishedPower:
    """Mean power of a device that trains ResNet-50 on ImageNet."""

    device: str
    watts: float
    limit_watts: float
    """The most that it may take."""
    source: str
    num_devices: int = 1
    """Devices of a node that was measured as a whole; watts is one's share."""


@dataclass(frozen=True)
class OwnRate:
    """Measured training rates of bigbatch on one device: the slower and the faster precision."""

    device: str
    model: str
    local_batch: int
    low: float
    high: float
    source: str


OWN_RATES = (
    OwnRate("H100", "resnet50", 256, 5573, 5835, "bf16 and fp16, CUDA graph, images on the device, n = 3: docs/gpu.md"),
)

ZEUS = "board alone, fp32; ml-energy/zeus, traces of NSDI 2023"
PUBLISHED_POWER = (
    # at the largest power limit, with batches of 128 or 256 images; batches of 8 take within 9% of this power
    PublishedPower("P100", 165.5, 250.0, ZEUS),
    PublishedPower("V100", 220.3, 250.0, ZEUS),
    PublishedPower("Quadro RTX 6000", 230.3, 260.0, ZEUS),
    PublishedPower("A40", 235.2, 300.0, ZEUS),
    # 5,671.89 kJ in 13.425 minutes; the limit is another node's, 10.2 kW (arXiv 2412.08602)
    PublishedPower("H100 SXM5", 880.2, 1275.0, "an eighth of an immersion-cooled node; MLPerf Training v4.0-0090", 8),
)
BOARD_LIMITS = {"P100 SXM2": 300.0, "V100 SXM2": 300.0, "V100 SXM3": 350.0}
"""Watts of other boards of a published device. Source: data sheets."""
BATCH_FACTOR = 2.0
"""Ratio to a model's largest and smallest checked local batch, beyond which a batch counts as unchecked."""
OTHER_MODEL = 10.0
"""Distance of another model, in doublings: further than any size."""
EPOCHS_TO_759 = {
    # global batch: mean epochs until 75.9% top-1, of MLPerf's reference convergence points for ResNet-50
    # RCP: mlcommons/logging:mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json; our recipes name each
    1632: 35.0,
    2048: 38.4,
    3264: 35.2,
    4096: 40.0,
    8192: 42.0,
    13056: 45.4,
    32768: 56.0,
    49152: 68.0,
    58880: 79.9,
    64480: 86.1,
    65536: 84.5,
    67840: 85.86,
}


def nearest_published(model: str, num_devices: int, local_batch: float) -> PublishedStep:
    def distance(each: PublishedStep) -> float:
        doublings = abs(math.log2(num_devices / each.num_devices)) + abs(math.log2(local_batch / each.local_batch))
        return doublings + OTHER_MODEL * (each.model != model)

    return min(PUBLISHED_STEPS, key=distance)


def beyond_checked(model: str, num_devices: int, local_batch: float) -> str | None:
    """Return what exceeds all published steps: the model, the number of devices, or the batch; None if nothing does."""
    known = [each for each in PUBLISHED_STEPS if each.model == model]
    if not known:
        return f"no step of {model} was published"
    if num_devices > max(each.num_devices for each in known):
        return f"no step of {model} was published for this many GPUs"
    batches = [each.local_batch for each in known]
    if not min(batches) / BATCH_FACTOR <= local_batch <= max(batches) * BATCH_FACTOR:
        return f"no step of {local_batch:,.4g} images at once was published of {model}"
    return None


def epochs_to_759(global_batch_size: int) -> float | None:
    """Return ResNet-50's epochs until 75.9% top-1 with LARS: between two records by the logarithm of the batch.

    Below the smallest record its epochs apply; None above the largest, as none were published.
    """
    batches = sorted(EPOCHS_TO_759)
    if global_batch_size > batches[-1]:
        return None
    right = bisect_left(batches, global_batch_size)
    if batches[right] == global_batch_size or right == 0:
        return EPOCHS_TO_759[batches[right]]
    low, high = batches[right - 1], batches[right]
    share = math.log(global_batch_size / low) / math.log(high / low)
    return EPOCHS_TO_759[low] + share * (EPOCHS_TO_759[high] - EPOCHS_TO_759[low])


def own_rate(device: str, model: str) -> OwnRate | None:
    """Return the recorded rate of bigbatch on a device, such as NVIDIA H100-SXM5-80GB; None without a record."""
    words = device.replace("-", " ").split()
    return next((each for each in OWN_RATES if each.device in words and each.model == model), None)


def plain_name(device: str) -> str:
    """Return a device's name as data sheets state it, without maker and hyphens."""
    words = device.replace("-", " ").removeprefix("NVIDIA ").removeprefix("Tesla ")
    return words.replace("H100 80GB HBM3", "H100 SXM5 80GB")  # as its driver names it


def power_of(device: str) -> PublishedPower | None:
    """Return the published power of a device, scaled by the limit of its board; None if none was published."""
    words = plain_name(device) + " "
    found = next((each for each in PUBLISHED_POWER if words.startswith(each.device + " ")), None)
    limit = next((watts for board, watts in BOARD_LIMITS.items() if words.startswith(board + " ")), None)
    if found is None or limit is None:
        return found
    return replace(found, watts=found.watts * limit / found.limit_watts, limit_watts=limit)
