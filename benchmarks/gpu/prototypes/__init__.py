"""Changes of a GPU's step that no run uses yet, each beside today's kernels (docs/gpu.md): values, launches, bytes, ms.

    python -m benchmarks.gpu.prototypes.block_end --small   # values, by Triton's interpreter where there is no GPU
    python -m benchmarks.gpu.prototypes.block_end           # milliseconds on a GPU
    python -m benchmarks.gpu.prototypes.block_end --cubins  # compile its kernels for an H200, which need not be here

Triton reads when it is imported whether to interpret; a prototype imports this package before.
"""

import os
import sys

import torch

if "--small" in sys.argv and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
