"""Around torch.compile: where its code is kept, and one line where it fails."""

from collections.abc import Callable

from bigbatch.comm.rendezvous.environ import keep_compiled_code


def compile_failure(first_call: Callable[[], object]) -> str:
    """Make the first call of what torch.compile was given, and say in one line why it cannot compile that, if so."""
    from torch._dynamo.exc import TorchDynamoException  # takes seconds to import, which only compiling needs
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    keep_compiled_code(torchs_own=default_cache_dir())
    try:
        first_call()
    except TorchDynamoException as error:
        said = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0]  # before it begins to explain
        return " ".join(said.split())[:300]
    return ""
