"""`bigbatch launch emulate`: a cluster of emulated nodes."""

import argparse
import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

from bigbatch.comm.rendezvous.environ import terminal_columns, without_identity
from bigbatch.comm.rendezvous.ports import FIRST_JOB_PORT, NUM_JOB_PORTS
from bigbatch.errors import LaunchOptionError, print_line, print_lines, tell
from bigbatch.launch.jobs.check import check_job
from bigbatch.launch.jobs.exit_file import exit_file, exit_file_variable, exit_path, with_code_of_first_rank
from bigbatch.launch.jobs.findings import Problems, as_refusal
from bigbatch.launch.jobs.foreground import Ended
from bigbatch.launch.jobs.installed import find_mpirun
from bigbatch.launch.jobs.options import PYTHON_HELP, add_options
from bigbatch.launch.jobs.restarts import run_with_restarts
from bigbatch.launch.jobs.run_folder import count_joins, has_begun, heals_in_place, load_experiment
from bigbatch.launch.jobs.spec import OPTIONS, JobSpec
from bigbatch.paths import as_path
from bigbatch.tools.emulate import cluster as clusters
from bigbatch.tools.emulate.launchers import NODE_LAUNCHERS, RUN_OPTIONS, StartContext
from bigbatch.tools.emulate.losses import KINDS, FaultInjector, parse_losses
from bigbatch.tools.emulate.plan import (
    DEFAULT_NAME,
    ClusterPlan,
    format_rate,
    host,
    make_plan,
    parse_name,
    parse_node,
    parse_rate,
)
from bigbatch.tools.emulate.programs import build_commands
from bigbatch.tools.emulate.run import run_job
from bigbatch.tools.emulate.slurm import (
    describe_nodes,
    describe_start,
    require_slurm,
    run_on_login_node,
    slurm_folder,
    start_slurm,
)
from bigbatch.tools.emulate.state import EmulatedCluster, load, state_root
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.step.signals import handled_signals, handling_stops
from bigbatch.words import whole


def main(argv: Sequence[str], *, environ: Mapping[str, str]) -> int:
    """Run a subcommand; return the exit code, for `run` that of the job."""
    words, environ = list(argv), without_identity(environ)
    split = words.index("--") if "--" in words else len(words)
    arguments, command = _parser().parse_args(words[:split]), tuple(words[split + 1 :])
    if getattr(arguments, "name", None) is not None:
        as_refusal(parse_name, arguments.name)
    root = state_root(environ)
    if arguments.action == "up":
        plan = replace(_plan(arguments, name=arguments.name), slurm=arguments.slurm)
        return _up(plan, root=root, environ=environ, dry_run=arguments.dry_run)
    if arguments.action == "exec":
        if not command:
            raise LaunchOptionError("nothing to run: put a command after --, such as -- sbatch job.sh")
        found = clusters.find(arguments.name, root=root)
        return run_on_login_node(command, cluster=found, root=root, environ=environ)
    if arguments.action == "run":
        return _run(arguments, command, root=root, environ=environ)
    if arguments.action == "shape":
        found = clusters.find(arguments.name, root=root)
        node = as_refusal(parse_node, arguments.node, num_nodes=found.plan.num_nodes) if arguments.node else None
        rate = as_refusal(parse_rate, arguments.link)
        clusters.shape(found, rate=rate, root=root, environ=environ, node=node)
        print_line(f"{arguments.name}: {'links' if node is None else f'the link of {host(node)}'} of {arguments.link}")
        return 0
    return _status(root, environ) if arguments.action == "status" else _down(arguments, root)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch launch emulate",
        description="Emulate a cluster on this machine: nodes with their own host names, addresses and links.",
        epilog="example: bigbatch launch emulate run --nodes 4 --ranks-per-node 2 --link 200mbit -- "
        "train --config quickstart",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="{up,run,exec,shape,status,down}")
    size = argparse.ArgumentParser(add_help=False)
    size.add_argument("--nodes", type=whole, help="number of nodes (default: as many as --ranks-per-node lists)")
    size.add_argument("--ranks-per-node", help="ranks of each node, such as 2, or 3,2,2,1 (default: 1)")
    add_options(size, RUN_OPTIONS[:2])
    size.add_argument("--dry-run", action="store_true", help="print the commands instead of running them")
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default=DEFAULT_NAME, help=f"name of the cluster (default: {DEFAULT_NAME})")
    up = actions.add_parser("up", parents=[named, size], help="build a cluster")
    up.add_argument("--slurm", action="store_true", help="with a real Slurm, and a CPU for each rank")
    run = actions.add_parser(
        "run",
        parents=[size],
        usage="bigbatch launch emulate run [OPTION ...] -- COMMAND [OPTION ...]",
        help="run a job on it; with --nodes or --ranks-per-node, on a cluster just for this job",
    )
    run.add_argument("--name", help=f"name of the cluster (default: {DEFAULT_NAME}, or a new one)")
    add_options(run, (*RUN_OPTIONS[2:], OPTIONS["restarts"]))
    for kind, (_, text) in KINDS.items():
        run.add_argument(f"--{kind}", action="append", metavar="NODE@step=N", help=f"at the report of a step: {text}")
    run.add_argument("--python", action="store_true", help=PYTHON_HELP)
    run.add_argument("--counters", type=as_path, metavar="FILE", help="write the bytes of each link there, as JSON")
    actions.add_parser(
        "exec",
        parents=[named],
        usage="bigbatch launch emulate exec [--name NAME] -- COMMAND [OPTION ...]",
        help="run a command in the first node of a cluster with Slurm, such as -- sbatch job.sh, or -- squeue",
    )
    shape = actions.add_parser("shape", parents=[named], help="give a cluster's links another rate")
    shape.add_argument("--link", required=True, help="such as 1gbit, or none")
    shape.add_argument("--node", help="node with the changed link, such as n2, to emulate a bad cable (default: all)")
    actions.add_parser("status", help="list the clusters of this user")
    down = actions.add_parser("down", parents=[named], help="remove a cluster and all that runs in it")
    down.add_argument("--all", action="store_true", help="all clusters of this user")
    return parser


def _plan(arguments: argparse.Namespace, *, name: str) -> ClusterPlan:
    return as_refusal(
        make_plan,
        name=name,
        nodes=arguments.nodes,
        ranks_per_node=arguments.ranks_per_node or "1",
        link=arguments.link,
        delay=arguments.delay,
    )


def _up(plan: ClusterPlan, *, root: Path, environ: Mapping[str, str], dry_run: bool) -> int:
    if dry_run:
        for place, argv in build_commands(plan):
            print_line(f"{place}: {shlex.join(argv)}")
        if plan.slurm:
            print_lines(describe_start(plan, folder=slurm_folder(root / plan.name)))
        return 0
    if plan.slurm:
        require_slurm(root / plan.name, environ=environ)
    built = clusters.up(plan, root=root, environ=environ)
    if plan.slurm:
        start_slurm(built, root=root, environ=environ)
    print_lines(_describe(plan))
    return 0


def _describe(plan: ClusterPlan) -> str:
    ranks = ",".join(map(str, plan.ranks_per_node))
    link = f"link {format_rate(plan.rate)}, delay {plan.delay_us}us"
    return f"{plan.name}: nodes {plan.num_nodes}, ranks {ranks}, {link}{', Slurm' if plan.slurm else ''}"


def _run(arguments: argparse.Namespace, command: tuple[str, ...], *, root: Path, environ: Mapping[str, str]) -> int:
    if not command:
        raise LaunchOptionError("nothing to run: put a bigbatch command after --, such as -- train --config quickstart")
    if arguments.nodes is None and arguments.ranks_per_node is None:
        if arguments.link or arguments.delay:
            raise LaunchOptionError(
                "--link and --delay come with --nodes; to change a cluster: bigbatch launch emulate shape"
            )
        found = clusters.find(arguments.name or DEFAULT_NAME, root=root)
        if found.plan.slurm:
            raise LaunchOptionError(
                f"Slurm starts the jobs of {found.plan.name}: bigbatch launch emulate exec --name {found.plan.name} "
                "-- sbatch job.sh"
            )
        job = _checked_job(command, found.plan, arguments)
        return _run_on(found, arguments, job, root=root, environ=environ)
    plan = _plan(arguments, name=arguments.name or f"run-{os.getpid()}")
    job = _checked_job(command, plan, arguments)
    if arguments.dry_run:
        return _run_on(EmulatedCluster(plan, 0, 0, ""), arguments, job, root=root, environ=environ)
    with handling_stops(_interrupt), _lifeline() as lifeline:
        built = clusters.up(plan, root=root, environ=environ, lifeline=lifeline)
        try:
            return _run_on(built, arguments, job, root=root, environ=environ)
        finally:
            _ignore_stops()  # an operation of milliseconds needs no interruption
            clusters.down(plan.name, root=root)


def _checked_job(command: tuple[str, ...], plan: ClusterPlan, arguments: argparse.Namespace) -> JobSpec:
    """Return the command's job, one rank for each of the plan's. Raises: JobRefused if its check finds errors."""
    job = JobSpec(command, plan.world_size, is_python=arguments.python, restarts=arguments.restarts)
    with Problems() as findings:
        check_job(job, findings, starts=not arguments.dry_run)
    return job


def _run_on(
    cluster: EmulatedCluster, arguments: argparse.Namespace, job: JobSpec, *, root: Path, environ: Mapping[str, str]
) -> int:
    make_processes, asks_to_stop = NODE_LAUNCHERS[arguments.launcher]
    injector = as_refusal(_fault_injector, arguments, job, cluster, environ=environ)
    context = StartContext(
        order=arguments.place,
        master_port=FIRST_JOB_PORT + os.getpid() % NUM_JOB_PORTS,
        mpirun=find_mpirun(),
        folder=root / cluster.plan.name,
        terminal_columns=terminal_columns(environ) or 0,
        variables=tuple(environ),
    )
    if arguments.dry_run:
        for each in make_processes(job, cluster.plan, context):
            variables = [f"{name}={value}" for name, value in each.variables]
            print_line(f"{host(each.node)}: {shlex.join([*variables, *each.argv])}")
        return 0

    heals, is_mpirun, is_plain = heals_in_place(job), arguments.launcher == "mpirun", arguments.launcher == "plain"

    def start(job: JobSpec) -> Ended:
        # for mpirun only: ranks that stop exit with 0 if there is a file, and other launchers return their ranks' codes
        with exit_file(exit_path(context.folder)) if is_mpirun else nullcontext() as path:
            ended = run_job(
                make_processes(replace(job, environment=exit_file_variable(path)), cluster.plan, context),
                cluster=cluster,
                root=root,
                environ={"OMP_NUM_THREADS": "1", **environ},
                asks_to_stop=asks_to_stop,
                counters=arguments.counters,
                # other launchers end a job that has lost a rank
                heals=has_begun(job) if heals and is_plain else None,
                joins=count_joins(job) if is_plain else 0,
                on_poll=injector,
            )
            return with_code_of_first_rank(ended, job, path=path, heals=heals) if is_mpirun else ended

    ended = run_with_restarts(start, job)
    for loss in injector.left:
        tell(f"{loss}: the run ended before it reported that step")
    return ended.code


def _fault_injector(
    arguments: argparse.Namespace, job: JobSpec, cluster: EmulatedCluster, *, environ: Mapping[str, str]
) -> FaultInjector:
    """Return the object that causes the stated losses, perhaps none. Raises: LaunchOptionError; ConfigError."""
    losses = parse_losses(arguments, num_nodes=cluster.plan.num_nodes)
    config = load_experiment(job) if losses else None
    if losses and config is None:
        raise LaunchOptionError(f"{losses[0]}: steps are those of `train`, such as -- train --config quickstart")
    metrics = RunDir(Path(config.run.directory)).metrics if config else Path()
    return FaultInjector(losses, metrics=metrics, cluster=cluster, environ=environ)


@contextmanager
def _lifeline() -> Iterator[int]:
    """Yield a pipe's read end for `up`: the cluster ends when this process closes the other end, also by kill -9."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Unwind like Ctrl-C, once: kill and a closed terminal must not leave a cluster for one job behind either."""
    _ignore_stops()
    raise KeyboardInterrupt


def _ignore_stops() -> None:
    for number in handled_signals():
        signal.signal(number, signal.SIG_IGN)


def _status(root: Path, environ: Mapping[str, str]) -> int:
    for name in clusters.names(root):
        cluster = load(root / name)
        counted = clusters.count(cluster) if cluster else None
        if cluster is None or counted is None:
            print_line(f"{name}: ended; remove its folder by bigbatch launch emulate down --name {name}")
            continue
        print_lines(_describe(cluster.plan))
        print_lines(clusters.format_table(counted))
        if cluster.plan.slurm:
            print_lines(describe_nodes(cluster, root=root, environ=environ))
    return 0


def _down(arguments: argparse.Namespace, root: Path) -> int:
    for name in clusters.names(root) if arguments.all else [arguments.name]:
        print_line(f"{name}: removed" if clusters.down(name, root=root) else f"{name}: there is no such cluster")
    return 0
