"""All launchers by name."""

from bigbatch.launch.launchers import flux, k8s, local, mpirun, slurm, torchrun

LAUNCHERS = {
    launcher.name: launcher for launcher in (each.LAUNCHER for each in (local, mpirun, torchrun, slurm, flux, k8s))
}
"""In the order of the help."""
