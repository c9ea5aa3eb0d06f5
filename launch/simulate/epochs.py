"""Number of epochs that a batch needs: MLPerf's reference convergence points for ResNet-50. Pure."""

import math
from bisect import bisect_left

EPOCHS_TO_759 = {
    # global batch: mean epochs until 75.9% top-1
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
