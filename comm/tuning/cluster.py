"""Facts of the cluster of a job, to compare with those of a tuned file."""

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.tuning.conditions import device_name, settings_of
from bigbatch.comm.tuning.tuned import ClusterFacts, make_cluster


def gather_cluster(communicator: Communicator) -> ClusterFacts:
    """Return the facts of this cluster that must equal those of a tuned file. Collective."""
    devices = set(communicator.gather_text(device_name(communicator.device)))
    return make_cluster(
        communicator.topology.groups,
        backend=communicator.backend.name,
        device=", ".join(sorted(devices)),
        **settings_of(communicator),
    )
