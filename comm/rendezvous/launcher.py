"""Find the launcher that started this process from its environment variables. Pure."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from bigbatch.errors import LaunchError, shortened
from bigbatch.words import whole

LAUNCHER_VARIABLES = {
    # launcher: (rank, world size, local rank, local size)
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "pals": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
"""In order of precedence: torchrun inside srun counts as torchrun, mpirun inside sbatch as openmpi (see find_launcher).

pals is the mpiexec of HPE Cray. Only Slurm's step variables count: a shell in a job of eight tasks is one
process. The last variables of flux and srun describe all nodes; local_size_of reads them.
Source: flux-environment(7); srun(1), "OUTPUT ENVIRONMENT VARIABLES".
"""
MPI_LAUNCHERS = ("openmpi", "mpich", "pals", "flux")
"""Launchers whose ranks can communicate by MPI at once."""
PMI_LAUNCHERS = ("pals", "flux", "srun")
"""Launchers that also set PMI_RANK and PMI_SIZE for MPICH's library: these do not prove that MPICH's mpiexec ran."""
PER_NODE = (
    'on each node, start bigbatch launch local --nodes "$WORLD_SIZE" --node-rank "$RANK" --master '
    '"$MASTER_ADDR:$MASTER_PORT" -- COMMAND'
)
PARTIAL_LAUNCHERS = (
    # a variable of it: (launcher, remedy)
    ("CROSS_RANK", "DeepSpeed", "use bigbatch launch, or set LOCAL_WORLD_SIZE to LOCAL_SIZE in the script"),
    ("FORK_LAUNCHED|ACCELERATE_.*", "accelerate", "make its Accelerator before bigbatch.connect(), which then uses it"),
    ("AZUREML_.*|AZ_BATCH.*|NODE_RANK", "Azure ML", f"with process_count_per_instance: 1, {PER_NODE}"),
    ("CLUSTER_SPEC", "Vertex AI", PER_NODE),
    ("RANK", "a PyTorchJob of Kubeflow v1", PER_NODE),
)
"""Launchers that set RANK and WORLD_SIZE, and perhaps LOCAL_RANK, without the number of ranks on the host.

Source: their launch.py (DeepSpeed), launchers.py (accelerate), envvar.go (Kubeflow's training-operator 1.9).
"""
UNKNOWN_LAUNCHERS = {
    # variable: (launcher, what to use instead)
    "HOROVOD_RANK": ("horovodrun", "mpirun"),
    "JSM_NAMESPACE_RANK": ("jsrun", "mpirun"),
    "PMIX_RANK": ("a PMIx launcher, such as prterun,", "mpirun, or srun with SLURM_* variables"),
    "MPT_MPI_RANK": ("HPE's MPT", "mpirun of Open MPI"),
    "MV2_COMM_WORLD_RANK": ("MVAPICH's mpirun_rsh", "its mpiexec, or srun"),
    "ALPS_APP_PE": ("aprun of ALPS", "mpiexec"),
    "LSF_PM_TASKID": ("blaunch of LSF", "mpirun"),
    "PBS_TASKNUM": ("pbsdsh of PBS", "mpirun"),
    "PET_NNODES": ("a trainer job of Kubeflow", "torchrun, which reads PET_*"),
    "SM_HOSTS": ("SageMaker", "torchrun, by its distribution torch_distributed"),
    "SKYPILOT_NUM_NODES": ("SkyPilot", "torchrun, or bigbatch launch local --nodes N --node-rank I --master HOST:PORT"),
}
"""Unsupported launchers: without a refusal each of their ranks would train alone."""
OF_ONE_PROCESS = {"PBS_TASKNUM": "1", "PET_NNODES": "1(:1)?", "SM_HOSTS": "[^,]*", "SKYPILOT_NUM_NODES": "1"}
"""Values of these variables, as regular expressions, if the process has no other ranks; 1 is a PBS job's own script."""
RANK_VARIABLES = (
    # torchrun's
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*"),
    # options of torchrun, as a PyTorchJob of Kubernetes states them
    "PET_*",
    # Open MPI's, also of version 4; other OMPI_MCA_*, PMIX_MCA_* and PRTE_MCA_* are settings and stay
    *("OMPI_ARGV", "OMPI_COMMAND", "OMPI_COMM_WORLD_*", "OMPI_WORLD_*", "OMPI_UNIVERSE_SIZE"),
    *("OMPI_APP_CTX_NUM_PROCS", "OMPI_FIRST_RANKS", "OMPI_NUM_APP_CTX", "OMPI_FILE_LOCATION"),
    *("OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir", "OMPI_MCA_ess", "OMPI_MCA_ess_*", "OMPI_MCA_orte_ess_*"),
    *("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"),
    *("PMIX_RANK", "PMIX_NAMESPACE", "PMIX_HOSTNAME", "PMIX_SERVER_*", "PMIX_SYSTEM_TMPDIR"),
    *("PMIX_BFROP_*", "PMIX_GDS_MODULE", "PMIX_SECURITY_MODE", "PMIX_VERSION", "PRTE_LAUNCHED"),
    # those of MPICH, Intel MPI and other users of PMI
    *("PMI_*", "PMI2_*", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PALS_*", "ALPS_APP_PE"),
    *("FLUX_TASK_*", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES", "JSM_NAMESPACE_*", "MV2_COMM_WORLD_*"),
    # horovodrun's
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_*", "HOROVOD_CROSS_*", "HOROVOD_GLOO_RENDEZVOUS_*"),
    # one Slurm task's; SLURM_JOB_* and similar ones describe the nodes and stay
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_STEPID"),
    *("SLURM_STEP_*", "SLURM_SRUN_*"),
)
"""Variables that state rank, world size and meeting point; * matches any end of a name."""
VARIABLES_TO_SET = "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"


def find_launcher(variables: Mapping[str, str], *, host: str) -> str | None:
    """Return the launcher that started this process, or None if no known one did. host: this host's name.

    If the variables of Open MPI and of a Slurm step are both set, one set is inherited. Either mpirun started the step
    (its daemons on other hosts) or runs inside it (an interactive step): then mpirun counts. Or a shell under mpirun
    called srun: then mpirun's variables are stale. They are stale if Slurm itself is the PMIx server (PMIX_NAMESPACE),
    or mpirun's server runs on another host (PMIX_HOSTNAME) or is older than the step's task, by the process numbers
    in PMIX_SERVER_TMPDIR and SLURM_TASK_PID. Open MPI before 5 sets none of these, and then mpirun counts.
    """
    is_step, is_partial = "SLURM_STEP_ID" in variables, False
    others = {LAUNCHER_VARIABLES[name][0] for name in PMI_LAUNCHERS if name != "srun" or is_step}
    for launcher, names in LAUNCHER_VARIABLES.items():
        if names[0] not in variables or not (names[1] in variables or launcher in ("pals", "flux")):
            continue
        if launcher == "srun" and not is_step:
            continue  # the batch script itself, not a task that srun started
        if launcher == "openmpi" and _is_stale(variables, host=host):
            continue
        if launcher == "mpich" and names[2] not in variables and others.intersection(variables):
            continue
        if launcher != "torchrun" or set(names) <= variables.keys():
            return launcher
        is_partial = True  # scripts set RANK and WORLD_SIZE from variables of srun or mpirun
    return "torchrun" if is_partial else None


def _is_stale(variables: Mapping[str, str], *, host: str) -> bool:
    """Return whether mpirun's variables are stale; see find_launcher."""
    if not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= variables.keys():
        return False
    if variables.get("PMIX_NAMESPACE", "").startswith("slurm."):
        return True
    server = re.search(r"\.(\d+)$", variables.get("PMIX_SERVER_TMPDIR", ""))
    task = variables.get("SLURM_TASK_PID", "")
    if server is None or not task.isdecimal():
        return False
    started_on = variables.get("PMIX_HOSTNAME", host)
    return started_on.partition(".")[0] != host.partition(".")[0] or int(server[1]) < int(task)


def missing_of_torchrun(variables: Mapping[str, str]) -> list[str]:
    """Return torchrun's variables that are not set: another launcher, or a script, set the others."""
    return [name for name in LAUNCHER_VARIABLES["torchrun"] if name not in variables]


def refuse_partial(variables: Mapping[str, str], missing: Sequence[str]) -> None:
    """Raise LaunchError that names the launcher which set torchrun's variables but for those missing."""
    found = (each for each in PARTIAL_LAUNCHERS if any(re.fullmatch(each[0], name) for name in variables))
    _, whose, remedy = next(found)
    raise LaunchError(
        f"RANK={variables['RANK']} of WORLD_SIZE={variables['WORLD_SIZE']} without {' and '.join(missing)}, as "
        f"{whose} sets them: {remedy}; or set {VARIABLES_TO_SET} for each rank"
    )


def refuse_unknown(variables: Mapping[str, str]) -> None:
    """Raise LaunchError if no launcher was found although this is apparently one of several ranks."""
    for name, (launcher, instead) in UNKNOWN_LAUNCHERS.items():
        if name in variables and not re.fullmatch(OF_ONE_PROCESS.get(name, "(?!)"), variables[name]):
            raise LaunchError(
                f"{name}={variables[name]} was set by {launcher} which does not state the number of ranks: "
                f"start them by {instead}, or set {VARIABLES_TO_SET} for each{_if_alone(name)}"
            )
    for launcher, (rank, size, local_rank, _) in LAUNCHER_VARIABLES.items():
        if launcher == "srun" and "SLURM_STEP_ID" not in variables:
            continue
        for name, other, least in ((rank, size, 0), (size, rank, 1), (local_rank, rank, 0)):
            if other not in variables and (text := variables.get(name, "")).isdecimal() and int(text[:18]) > least:
                of_launcher = "" if launcher == "torchrun" else f" of {launcher}"
                raise LaunchError(
                    f"{name}={text} is set without {other}, so this is one of several ranks{of_launcher}: pass all "
                    f"variables of its launcher on, or set {VARIABLES_TO_SET}{_if_alone(name)}"
                )
    if "MASTER_ADDR" in variables:
        raise LaunchError(
            f"MASTER_ADDR={variables['MASTER_ADDR']} names the meeting point of several ranks, but RANK and "
            f"WORLD_SIZE are not set: set {VARIABLES_TO_SET} for each rank, or make the process group before "
            f"bigbatch.connect(){_if_alone('MASTER_ADDR')}"
        )


def _if_alone(*names: str) -> str:
    return f"; only if this process has no other ranks, unset {' and '.join(names)}"


def local_size_of(variables: Mapping[str, str], launcher: str) -> int:
    """Return the number of ranks on this host. Raises: LaunchError."""
    name = LAUNCHER_VARIABLES[launcher][3]
    if launcher == "srun":
        return _slurm_local_size(variables)
    if launcher == "flux":
        return _flux_local_size(variables)
    if launcher == "pals" and name not in variables:
        name = "PALS_LOCAL_SIZE"
    return number(variables, name, launcher)


def number(variables: Mapping[str, str], name: str, launcher: str) -> int:
    """Return a launcher's variable as an integer. Raises: LaunchError if it is missing or not a number."""
    try:
        return whole(variables[name])
    except KeyError:
        known = LAUNCHER_VARIABLES.get(launcher)
        left_over = _if_alone(*known[:2]) if known else ""
        raise LaunchError(
            f"{launcher} did not set {name}; start the job with {launcher}'s own command{left_over}"
        ) from None
    except ValueError:
        raise LaunchError(f"{name}={variables[name]!r} is not a number") from None


def _flux_local_size(variables: Mapping[str, str]) -> int:
    ranks, nodes = (number(variables, name, "flux") for name in ("FLUX_JOB_SIZE", "FLUX_JOB_NNODES"))
    if nodes < 1 or ranks % nodes:
        raise LaunchError(
            f"FLUX_JOB_SIZE={ranks} on FLUX_JOB_NNODES={nodes}: flux does not say how many are on this node: give "
            f"each node the same number, by --tasks-per-node, or set {VARIABLES_TO_SET} for each rank"
        )
    return ranks // nodes


def _slurm_local_size(variables: Mapping[str, str]) -> int:
    """Return the tasks on this node from text such as '2(x3),1': two on each of three nodes, one on the fourth."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
    nodes: list[tuple[range, int]] = []
    first = 0
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip())
        if not match:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not in Slurm's form, such as 8(x4)")
        end = first + int(match[2] or 1)
        nodes.append((range(first, end), int(match[1])))
        first = end
    node = number(variables, "SLURM_NODEID", "srun")
    for alike, num_tasks in nodes:
        if node in alike:
            return num_tasks
    raise LaunchError(f"SLURM_NODEID={node} has no entry in SLURM_STEP_TASKS_PER_NODE={text!r}")


MAX_HOSTS = 100_000
"""Limit of hosts in a host list: more than any cluster has, few enough to expand at once."""


def expand_hostlist(text: str) -> list[str]:
    """Expand Slurm's compact host list: 'n[01-03,7],login' -> n01 n02 n03 n7 login.

    Raises: LaunchError if the text is not a host list or has more than MAX_HOSTS hosts.
    """
    item = r"(?:[^,\[\]\s]|\[[^\[\]]*\])+"
    if not re.fullmatch(f"{item}(?:,{item})*", text, re.ASCII):
        raise LaunchError(f"{shortened(text)} is not a Slurm host list, such as node[01-04]")
    written = (host for each in re.findall(item, text, re.ASCII) for host in _expand_item(each))
    hosts = list(itertools.islice(written, MAX_HOSTS + 1))
    if len(hosts) > MAX_HOSTS:
        raise LaunchError(f"{shortened(text)} holds more than {MAX_HOSTS} hosts: name fewer, such as node[01-04]")
    return hosts


def _expand_item(item: str) -> Iterator[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if not match:
        yield item
        return
    for span in match[1].split(","):
        limits = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", span, re.ASCII)
        if not limits or int(limits[1]) > int(limits[2] or limits[1]):
            raise LaunchError(f"{shortened(item)} is not a Slurm host list, such as node[01-04]")
        for each in range(int(limits[1]), int(limits[2] or limits[1]) + 1):
            yield from _expand_item(f"{item[: match.start()]}{each:0{len(limits[1])}d}{item[match.end() :]}")
