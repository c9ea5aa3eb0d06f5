"""Facts of the cluster of a job, and the tuned file that was made on it."""

from pathlib import Path

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.tuning.conditions import device_name, settings_of
from bigbatch.comm.tuning.tuned import ClusterFacts, Tuned, make_cluster, parse_tuned, read_text
from bigbatch.errors import TunedError


def gather_cluster(communicator: Communicator) -> ClusterFacts:
    """Return the facts of this cluster that must equal those of a tuned file. Collective."""
    devices = set(communicator.gather(device_name(communicator.device)))
    return make_cluster(
        communicator.connection.topology.groups,
        backend=communicator.transport.backend.name,
        device=", ".join(sorted(devices)),
        **settings_of(communicator),
    )


def gather_tuned(path: Path, communicator: Communicator) -> Tuned:
    """Return the tuned file as rank 0 reads it, if it was made on this cluster. Collective.

    Raises: TunedError, on all ranks alike.
    """
    text = problem = ""
    if communicator.rank == 0:
        try:
            text = read_text(path)
        except TunedError as error:
            problem = str(error)
    text, problem = communicator.gather([text, problem])[0]
    if problem:
        raise TunedError(problem)
    tuned = parse_tuned(text, path=path)
    tuned.require_cluster(gather_cluster(communicator), path=path)
    return tuned
