"""All launchers by name."""

from bigbatch.launch.launchers import k8s, local, mpirun, slurm, torchrun

LAUNCHERS = {
    launcher.name: launcher
    for launcher in (local.LAUNCHER, mpirun.LAUNCHER, torchrun.LAUNCHER, slurm.LAUNCHER, k8s.LAUNCHER)
}
"""In the order of the help."""
