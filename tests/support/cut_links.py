"""Cut the link of an emulated node, like a dead switch."""

import os

from bigbatch.tools.emulate.cluster import reporting_lost_cluster, run_inside, system_path
from bigbatch.tools.emulate.programs import cut_command, port
from bigbatch.tools.emulate.state import EmulatedCluster


def cut(cluster: EmulatedCluster, node: int, *, arriving: bool = True, leaving: bool = True) -> None:
    """Drop the packets to a node, or from it, or both, until its link is shaped. Raises: EmulationError."""
    with reporting_lost_cluster(cluster):
        for device, where, is_cut in (("eth0", node, leaving), (port(node), None, arriving)):
            if is_cut:
                environ = os.environ | {"PATH": system_path(os.environ)}
                run_inside(cluster, cut_command(device), node=where, environ=environ)
