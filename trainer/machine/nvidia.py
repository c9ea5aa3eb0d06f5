"""Read facts on a host's GPUs from nvidia-smi and the kernel; names of fields are those of NVIDIA's manual page."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from bigbatch.trainer.machine.kernel_files import read_text

QUERY_SECONDS = 8
END_SECONDS = 1
"""Seconds to wait for a killed process: a hanging driver keeps it alive for ever."""
GPU_QUERY = "name,driver_version,clocks.sm,clocks.max.sm,temperature.gpu"
HEALTH_QUERY = "uuid,pcie.link.width.current,pcie.link.width.max,ecc.errors.uncorrected.volatile.total,mig.mode.current"
REMAPS_QUERY = "gpu_uuid,remapped_rows.pending,remapped_rows.failure"
PROCESSES_QUERY = "pid,gpu_uuid"

INFOROM_CORRUPTED = 14
"""Exit code of nvidia-smi that is only a warning: the GPUs work, and its output has all rows."""
NO_ANSWER = "no answer within"
NO_GPUS = "No devices were found"
LOST = re.compile(r"unable to determine the device handle|GPU is lost", re.I)
LINK = re.compile(r"^GPU (?P<gpu>\d+):|^\s+Link \d+: (?:(?P<active>[\d.]+ GB/s)|(?P<inactive><inactive>))")
XID = re.compile(r"NVRM: Xid \(PCI:(?P<address>[0-9a-fA-F:.]+)\): (?P<number>\d+)")
HARDWARE_XIDS = (48, 62, 64, 74, 79, 92, 95, 119, 120, 140)
"""Xids of faults of memory, NVLink, bus and system processor, without those of programs' errors (13, 31, 43, 45)."""
MAX_LOG_BYTES = 16 << 20


@dataclass(frozen=True)
class NvLinks:
    active: int
    inactive: int


@dataclass(frozen=True)
class Driver:
    """Output of nvidia-smi; empty if it is not installed, and without fields that this driver does not know."""

    gpus: tuple[str, ...] = ()
    """GPU_QUERY of each GPU, as the driver writes it."""
    complaint: str | None = None
    """Reason why it lists not all GPUs or did not answer in time; None if there is none."""
    health: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """UUID -> HEALTH_QUERY and REMAPS_QUERY: field -> value."""
    processes: Sequence[Mapping[str, str]] = ()
    """PROCESSES_QUERY of each process."""
    links: Mapping[int, NvLinks] = field(default_factory=dict)
    """Number of the GPU -> its NVLinks."""


def query_driver() -> Driver:
    """Return the output of all queries of nvidia-smi, in at most twice QUERY_SECONDS + END_SECONDS."""
    listed, complaint = _query(f"--query-gpu={GPU_QUERY}")
    gpus = tuple(line.strip() for line in listed if line.count(",") == GPU_QUERY.count(","))
    if complaint or not gpus:
        return Driver(gpus, complaint)
    questions = (
        (f"--query-gpu={HEALTH_QUERY}",),
        (f"--query-remapped-rows={REMAPS_QUERY}",),
        (f"--query-compute-apps={PROCESSES_QUERY}",),
        ("nvlink", "-s"),
    )
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda words: _query(*words), questions))
    health, remaps, processes, links = (lines for lines, _ in answers)
    # other complaints do not count: an older driver refuses queries that it does not know
    late = next((complaint for _, complaint in answers if complaint and complaint.startswith(NO_ANSWER)), None)
    found = {row["uuid"]: row for row in _rows(health, HEALTH_QUERY)}
    remapped = {row["gpu_uuid"]: row for row in _rows(remaps, REMAPS_QUERY)}
    return Driver(
        gpus=gpus,
        complaint=late,
        health={uuid: {**row, **remapped.get(uuid, {})} for uuid, row in found.items()},
        processes=tuple(_rows(processes, PROCESSES_QUERY)),
        links=parse_links(links),
    )


def list_gpus() -> tuple[int, str | None]:
    """Return the number of GPUs that the driver lists, and its complaint; 0 and None without a driver."""
    listed, complaint = _query("-L")
    return sum(line.startswith("GPU ") for line in listed), complaint


def _query(*words: str) -> tuple[list[str], str | None]:
    """Return the output of nvidia-smi, and its complaint."""
    table = ["--format=csv,noheader"] if words[0].startswith("--query") else []
    argv, pipe, nowhere = ["nvidia-smi", *words, *table], subprocess.PIPE, subprocess.DEVNULL
    try:
        program = subprocess.Popen(argv, stdin=nowhere, stdout=pipe, stderr=pipe, text=True, errors="replace")
    except OSError:
        return [], None
    try:
        stdout, stderr = program.communicate(timeout=QUERY_SECONDS)
    except subprocess.TimeoutExpired:
        program.kill()
        with suppress(subprocess.TimeoutExpired):
            program.wait(END_SECONDS)
        for stream in filter(None, (program.stdout, program.stderr)):
            stream.close()
        return [], f"{NO_ANSWER} {QUERY_SECONDS} s"
    # complaints come on either stream; if there are rows, on stderr
    lines = [line for line in (stderr + "\n" + stdout).splitlines() if line.strip()]
    if any(NO_GPUS in line for line in lines):
        return [], None
    lost = [line for line in lines if LOST.search(line)]
    if lost or program.returncode not in (0, INFOROM_CORRUPTED):
        complaint = "".join(letter for letter in (lost or lines or [""])[0].strip() if letter.isprintable())
        return stdout.splitlines(), complaint[:200] or f"exit code {program.returncode}"
    return stdout.splitlines(), None


def _rows(lines: Sequence[str], query: str) -> list[dict[str, str]]:
    names = query.split(",")
    cells = ([cell.strip() for cell in line.split(",")] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in cells if len(row) == len(names)]


def parse_links(lines: Sequence[str]) -> dict[int, NvLinks]:
    """Count the links of each GPU in the output of `nvidia-smi nvlink -s`."""
    found: dict[int, NvLinks] = {}
    gpu = None
    for line in lines:
        if match := LINK.match(line):
            if match["gpu"]:
                gpu = int(match["gpu"])
            elif gpu is not None:
                before = found.get(gpu, NvLinks(0, 0))
                found[gpu] = NvLinks(before.active + bool(match["active"]), before.inactive + bool(match["inactive"]))
    return found


def count_gpus_on_bus(root: Path = Path("/")) -> int:
    """Count NVIDIA's GPUs on the PCI bus, including those that a driver or a container hides."""
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    # 03: a display controller, which data-centre GPUs are, too
    return sum(
        read_text(path) == "0x10de" and read_text(path.with_name("class")).startswith("0x03") for path in vendors
    )


def may_have_gpus(root: Path = Path("/")) -> bool:
    """Return whether the host has NVIDIA's GPUs, or a driver that may list some."""
    return count_gpus_on_bus(root) > 0 or shutil.which("nvidia-smi") is not None


def has_gpudirect(root: Path = Path("/")) -> bool:
    """Return whether a network card may access GPUs' memory (GPUDirect): by a kernel module, or by dmabuf.

    dmabuf needs Linux 5.12, the driver's open kernel modules, and support by the card's driver, which is not checked.
    """
    modules = {line.split(" ")[0] for line in read_text(root / "proc/modules").splitlines()}
    numbers = re.match(r"(\d+)\.(\d+)", read_text(root / "proc/sys/kernel/osrelease"))
    is_recent = numbers is not None and (int(numbers[1]), int(numbers[2])) >= (5, 12)
    is_open = "Open Kernel Module" in read_text(root / "proc/driver/nvidia/version")
    return bool(modules & {"nvidia_peermem", "nv_peer_mem"}) or (is_recent and is_open)


def torch_cuda() -> str:
    """Return the version of CUDA that torch was built for, without importing torch; "" for none."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else Path()
    match = re.search(r"^cuda\b[^=\n]*= '([\d.]+)'", read_text(file), re.M)
    return match[1] if match else ""


def has_cuda_compat(root: Path = Path("/")) -> bool:
    """Return whether there are libraries by which an older driver runs a newer CUDA, as in NVIDIA's containers."""
    return any((root / "usr/local").glob("cuda*/compat/**/libcuda.so.1"))


def read_xids(root: Path = Path("/")) -> dict[str, int]:
    """Count GPU errors in the kernel's log by Xid and PCI address; none if the log is not readable."""
    found: dict[str, int] = {}
    for match in XID.finditer(_kernel_log(root / "dev/kmsg").decode(errors="replace")):
        if int(match["number"]) in HARDWARE_XIDS:
            error = f"Xid {match['number']} of {match['address']}"
            found[error] = found.get(error, 0) + 1
    return found


def _kernel_log(path: Path) -> bytes:
    log = bytearray()
    with suppress(OSError):  # PermissionError: no right to open it; BlockingIOError: no more records
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while (record := _record(descriptor)) and len(log) < MAX_LOG_BYTES:
                log += record
        finally:
            os.close(descriptor)
    return bytes(log)


def _record(descriptor: int) -> bytes:
    """Read the next record. Raises: BlockingIOError after the last one."""
    while True:
        try:
            return os.read(descriptor, 8192)
        except BrokenPipeError:  # the kernel has overwritten the record: read the next one
            continue
