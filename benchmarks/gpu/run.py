"""All measurements on one GPU: speed, memory's and kernels' limits, peers; one command, one record per GPU.

    python -m benchmarks.gpu.run --out benchmarks/results            # on the GPU at hand; small on a CPU where none is
    python -m benchmarks.gpu.run --only training steps --vision vision/references/classification --out results
    python -m benchmarks.gpu.run --guard --out benchmarks/results    # 1 where a figure lost more than 5%

Leave the machine alone meanwhile. A case is written as soon as it is done, into gpu-NAME.json of that GPU, with its
own conditions; the others stay as they are, so that several commands can share the work (--minutes says when to stop).
"""

import sys

from benchmarks.gpu.suite.command import main

if __name__ == "__main__":
    sys.exit(main())
