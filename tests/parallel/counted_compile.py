"""`bigbatch` on ranks that compile, and say what of it they found compiled: the target of a job."""

import os
import sys
from collections.abc import Callable

import pytest

from bigbatch.cli import main
from bigbatch.trainer.build import compiled
from bigbatch.trainer.models import regions


def bigbatch(*command: str) -> int:
    """Run the command, with the cache that TORCHINDUCTOR_CACHE_DIR names."""
    patch, compile_failure = pytest.MonkeyPatch(), compiled.compile_failure  # until this process ends

    def counted(first_call: Callable[[], object]) -> str:
        failure = compile_failure(first_call)
        from torch._dynamo.utils import counters

        found = counters["inductor"]
        print(os.environ["RANK"], found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], file=sys.stderr, flush=True)
        return failure

    patch.setattr(compiled, "compile_failure", counted)
    patch.setattr(regions, "set_compile_cache", lambda torchs_own: None)
    return main(command)
