"""Shared parts of the measurements of a job: options, the connection, the check of memory."""

import argparse
import os

import torch

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import BACKENDS, BUFFERS, REDUCE_DTYPES, connect
from bigbatch.comm.measure.figures import show_bytes
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import CommError
from bigbatch.numbers import decimal, whole


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that connect_as_told() reads, except --wire-dtype."""
    add = parser.add_argument
    add("--backend", choices=BACKENDS, default="auto", help="transport (default: %(default)s)")
    add("--reduce-dtype", choices=REDUCE_DTYPES, default="fp32", help="half-precision sums (default: %(default)s)")
    add("--group-size", type=whole, help="ranks per node group (default: all of a host)")
    add("--buffers", choices=BUFFERS, default="torch", help="memory of the tensors, with NCCL (default: %(default)s)")
    add("--interface", help="network interface, such as eth0 (default: the one that leads to the others)")
    add("--timeout-seconds", type=decimal, default=60.0, help="limit for a silent peer (default: %(default)s)")


def require_numbers(arguments: argparse.Namespace, *, least: dict[str, int], seconds: tuple[str, ...]) -> None:
    """Check the least values of whole-number options, and lengths of time. Raises: CommError naming one."""
    values = {f"--{name.replace('_', '-')}": value for name, value in vars(arguments).items()}
    for option, minimum in least.items():
        if values[option] is not None and values[option] < minimum:
            raise CommError(f"{option} {values[option]} is too few; give at least {minimum}")
    for option in seconds:
        if not 0 < values[option] < float("inf"):
            raise CommError(f"{option} {values[option]:g} is no length of time; give a positive number of seconds")


def connect_as_told(arguments: argparse.Namespace) -> Communicator:
    """Meet the other ranks. Collective. Raises: CommError for what connect() refuses."""
    try:
        return connect(
            backend=arguments.backend,
            group_size=arguments.group_size,
            warn_seconds=arguments.timeout_seconds,  # a large sum may take long
            timeout_seconds=arguments.timeout_seconds,
            interface=arguments.interface,
            buffers=arguments.buffers,
            wire_dtype=arguments.wire_dtype,
            reduce_dtype=arguments.reduce_dtype,
            env=read_process_env(),
        )
    except ValueError as error:
        raise CommError(str(error)) from error


def require_memory(num_bytes: int, communicator: Communicator, *, copies: int) -> None:
    """Refuse a --max-bytes if that many copies do not fit into the machine. Raises: CommError."""
    if communicator.device.type == "cuda":
        memory, share = torch.cuda.mem_get_info(communicator.device)[1], 1
    else:
        memory, share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), communicator.env.local_size
    room = memory // (share * copies)
    if num_bytes > room:
        times = "twice" if copies == 3 else f"{copies - 1} times"
        raise CommError(
            f"--max-bytes: {show_bytes(num_bytes)} bytes for each of {share} ranks, and as much again {times} to "
            f"work with, do not fit into the {memory / 2**30:.0f} GiB of {communicator.env.host}; give at most "
            f"{show_bytes(1 << (room.bit_length() - 1))}"
        )
