"""torch.compile: its cache folder, and its errors in one line."""

from collections.abc import Callable

from bigbatch.comm.rendezvous.environ import keep_compiled_code


def compile_failure(first_call: Callable[[], object]) -> str:
    """Call a compiled function for the first time; return one line on why it cannot be compiled, else ""."""
    from torch._dynamo.exc import TorchDynamoException  # takes seconds to import, which only compiling needs
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    keep_compiled_code(torchs_own=default_cache_dir())
    try:
        first_call()
    except TorchDynamoException as error:
        said = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0]  # before it begins to explain
        return " ".join(said.split())[:300]
    return ""
