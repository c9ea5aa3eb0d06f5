"""The cases of benchmarks/gpu, and what they share. Makes record.py importable, which all benchmarks share."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2]
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "input")]
