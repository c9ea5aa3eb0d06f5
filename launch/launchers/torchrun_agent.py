"""Run torchrun without its traceback and table: the failed rank has reported its error, and the job gets its exit code.

The only module of launch that imports torch: `launch torchrun` starts it in a separate process.
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from bigbatch.comm.rendezvous.ports import MAX_TRIES, free_port
from bigbatch.errors import FAILED, INTERRUPTED, LOST, first_line, tell
from bigbatch.launch.jobs.foreground import shell_code
from bigbatch.launch.jobs.processes import describe_exit


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments; return the exit code of the rank that failed first, or 0.

    --master-port=0: at a port that is free when torchrun opens it, before it starts ranks.
    That rank is named if a signal ended it or it runs a user's script: any other has reported its failure itself.
    """
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args

    arguments = parse_args(list(argv))
    if not arguments.max_restarts:  # with restarts, torchrun's messages name the rank that failed before each
        logging.disable(logging.ERROR)
    try:
        _run(arguments)
    except SignalException:
        return INTERRUPTED  # its ranks have saved and stopped, or were ended
    except DistNetworkError as error:
        at = f"{arguments.master_addr}:{arguments.master_port}"
        tell(f"no rendezvous at {at}: {first_line(error)}; state a free port of the first node by --master")
        return FAILED
    except ChildFailedError as error:
        # a rank that ends because another one was lost is not the cause
        rank, failure = min(error.failures.items(), key=lambda each: (each[1].exitcode == LOST, each[1].timestamp))
        if failure.exitcode < 0 or arguments.training_script != "bigbatch":
            tell(f"rank {rank} {describe_exit(failure.exitcode)}")
        return shell_code(failure.exitcode)
    return 0


def _run(arguments: argparse.Namespace) -> None:
    from torch.distributed import DistNetworkError
    from torch.distributed.run import run

    stated = arguments.master_port
    for left in reversed(range(MAX_TRIES)):
        arguments.master_port = stated or free_port()
        try:
            run(arguments)
        except DistNetworkError:  # another process was faster
            if stated or not left:
                raise
        else:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
