"""A made-up /sys, /proc and /dev, by the formats that the kernel's documentation and manual pages state."""

from pathlib import Path

ERRORS = ("symbol_error", "link_downed", "port_rcv_errors")


def write(root: Path, path: str, text: object) -> None:
    """Write a file, as the kernel does with a line's end."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def add_card(root: Path, name: str, mbit: object, *, state: str = "up", mtu: int = 1500, below: str = "") -> None:
    """Add a network interface: of hardware, or, as a bond, upon another one; below is " " for a virtual one."""
    folder = f"sys/class/net/{name}"
    for file, text in (("speed", mbit), ("operstate", state), ("mtu", mtu)):
        write(root, f"{folder}/{file}", text)
    if not below:
        (root / folder / "device").mkdir()
    elif below.strip():
        (root / folder / f"lower_{below}").mkdir()
        (root / f"sys/class/net/{below}/master").mkdir()


def add_port(
    root: Path,
    name: str,
    *,
    state: str = "4: ACTIVE",
    physical: str = "5: LinkUp",
    rate: str = "400 Gb/sec (4X NDR)",
    layer: str = "InfiniBand",
    gids: tuple[tuple[str, str], ...] = (),
    errors: int = 0,
) -> None:
    """Add a port as in mlx5_0/1; gids: (address, kind)."""
    device, _, number = name.partition("/")
    folder = f"sys/class/infiniband/{device}/ports/{number}"
    for file, text in (("state", state), ("phys_state", physical), ("rate", rate), ("link_layer", layer)):
        write(root, f"{folder}/{file}", text)
    for index, (address, kind) in enumerate(gids):
        write(root, f"{folder}/gids/{index}", address)
        write(root, f"{folder}/gid_attrs/types/{index}", kind)
    for counter in ERRORS:
        write(root, f"{folder}/counters/{counter}", errors)


def add_limits(root: Path, *, locked: object = "unlimited", files: tuple[object, object] = (1024, 524288)) -> None:
    """Write proc_pid_limits(5); two of its lines count; locked: soft, in bytes."""
    lines = (
        ("Limit", "Soft Limit", "Hard Limit", "Units"),
        ("Max cpu time", "unlimited", "unlimited", "seconds"),
        ("Max open files", *files, "files"),
        ("Max locked memory", locked, "unlimited", "bytes"),
        ("Max nice priority", 0, 0, ""),
    )
    text = "".join(f"{name:<26}{soft!s:<21}{hard!s:<21}{unit:<10}\n" for name, soft, hard, unit in lines)
    write(root, "proc/self/limits", text.rstrip("\n"))


def add_gpu_on_bus(root: Path, address: str, *, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    """Add a PCI device: by itself a data-centre GPU of NVIDIA's."""
    write(root, f"sys/bus/pci/devices/{address}/vendor", vendor)
    write(root, f"sys/bus/pci/devices/{address}/class", kind)
