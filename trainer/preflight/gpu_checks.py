"""Checks of a host's GPUs. Pure."""

from collections.abc import Callable, Iterator, Mapping

from bigbatch.trainer.machine.kernel_files import leading_number
from bigbatch.trainer.machine.nvidia import HARDWARE_XIDS
from bigbatch.trainer.preflight.check import Check, Host


def _driver(host: Host) -> Iterator[str]:
    # a host without a GPU may have the program without the hardware
    if host.wants_gpus and host.driver.complaint and (host.on_gpus or host.gpus_on_bus):
        yield f"nvidia-smi: {host.driver.complaint}"


def _unseen_gpus(host: Host) -> Iterator[str]:
    if host.wants_gpus and not host.on_gpus and host.gpus_on_bus and not host.driver.complaint:
        yield f"{host.gpus_on_bus} NVIDIA GPUs on the PCI bus, and its ranks compute on the CPU"


def _foreign(host: Host) -> Iterator[str]:
    for process, gpu in host.foreign.items():
        yield f"process {process}, which is not of this job, uses {gpu}"


def _health(
    field_name: str, is_bad: Callable[[str, Mapping[str, str]], bool], shown: str
) -> Callable[[Host], Iterator[str]]:
    """Make a check of a field of all ranks' GPUs; `[N/A]` and the like are no numbers, and no "Yes"."""

    def find(host: Host) -> Iterator[str]:
        for uuid, row in host.driver.health.items():
            value = row.get(field_name, "")
            if uuid in host.own_gpus and is_bad(value, row):
                yield f"{uuid}: {shown.format(value=value, row=row)}"

    return find


def _is_true(value: str, row: Mapping[str, str]) -> bool:
    return value in ("1", "Yes")


def _is_narrow(value: str, row: Mapping[str, str]) -> bool:
    width = leading_number(value)
    return width is not None and width < (leading_number(row["pcie.link.width.max"]) or 0)


def _mig(host: Host) -> Iterator[str]:
    # a rank on a slice has the slice's UUID, which the driver lists under its GPU
    has_slice = any(gpu not in host.driver.health for gpu in host.own_gpus)
    # a single rank has no peer
    health = host.driver.health if host.on_gpus and host.world_size > 1 else {}
    for uuid, row in health.items():
        if (has_slice or uuid in host.own_gpus) and row["mig.mode.current"] == "Enabled":
            yield f"{uuid}: MIG is enabled"


def _nvlinks(host: Host) -> Iterator[str]:
    most = max((links.active for links in host.driver.links.values()), default=0)
    for gpu, links in host.driver.links.items():
        # one without any may have no bridge
        if host.on_gpus and links.inactive and 0 < links.active < most:
            yield f"GPU {gpu}: {links.active} active NVLinks, another GPU has {most}"


def _xids(host: Host) -> Iterator[str]:
    for told, count in host.xids.items():
        yield f"{told}, {count} times since the host started"


GPU_CHECKS = (
    Check(
        "driver",
        "`nvidia-smi`, where the PCI bus has a GPU of NVIDIA's",
        "it fails, loses a GPU, or gives no answer within 8 s",
        "see nvidia-smi there; mend the driver, or reboot",
        _driver,
    ),
    Check(
        "unseen GPUs",
        "GPUs on the PCI bus",
        "there are some, and the job computes on the CPU",
        "ask the scheduler or the container for them, or say --device cpu",
        _unseen_gpus,
        is_finding=False,
    ),
    Check(
        "foreign processes",
        "processes on the ranks' GPUs",
        "one that is not of this job",
        "end it, or ask for nodes of your own (--sbatch exclusive)",
        _foreign,
    ),
    Check(
        "ECC",
        "uncorrected memory errors since the driver started",
        "any",
        "have its administrator reset the GPU, and replace it where they come back",
        _health(
            "ecc.errors.uncorrected.volatile.total",
            lambda value, _: (leading_number(value) or 0) > 0,
            "{value} uncorrected memory errors",
        ),
    ),
    Check(
        "row remapping",
        "rows of GPU memory that were to be replaced",
        "one could not be",
        "have the GPU replaced",
        _health("remapped_rows.failure", _is_true, "a row of its memory could not be remapped"),
    ),
    Check(
        "pending rows",
        "rows of GPU memory that wait to be replaced",
        "any",
        "have its administrator reset the GPU after the job",
        _health("remapped_rows.pending", _is_true, "a row of its memory waits to be remapped"),
        is_finding=False,
    ),
    Check(
        "MIG",
        "MIG mode",
        "on: a rank has a slice of a GPU, and NCCL no way between slices",
        "have it turned off (nvidia-smi -mig 0), or ask for whole GPUs",
        _mig,
    ),
    Check(
        "PCIe width",
        "lanes of each GPU",
        "fewer than GPU and system can have",
        "reseat the card, unless its slot has no more",
        _health("pcie.link.width.current", _is_narrow, "x{value} of x{row[pcie.link.width.max]} PCIe lanes"),
        is_finding=False,
    ),
    Check(
        "NVLink",
        "active NVLinks of each GPU",
        "some, and fewer than another GPU of the host",
        "see nvidia-smi nvlink -s and the fabric manager's log",
        _nvlinks,
    ),
    Check(
        "Xid",
        "the kernel's log, where it may be read",
        f"an Xid of the hardware ({', '.join(map(str, HARDWARE_XIDS))})",
        "look it up in NVIDIA's list of Xids; reset the GPU, or reboot",
        _xids,
        is_finding=False,
    ),
)
