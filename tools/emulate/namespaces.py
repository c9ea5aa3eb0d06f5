"""Linux namespaces by their system calls (os.setns and os.unshare exist from Python 3.12 on only)."""

import ctypes
import errno
import os

NEWNS = 0x00020000
NEWUTS = 0x04000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000

MS_BIND = 4096
MS_REC = 16384
MS_SLAVE = 1 << 19

KINDS = ("net", "uts", "mnt")
"""Namespaces of each node. mnt comes last on entering: it changes what /proc shows."""

FIRST_FD = 100


def node_fd(node: int, kind: str) -> int:
    """Return the file descriptor under which the keeper holds a node's namespace."""
    return FIRST_FD + node * len(KINDS) + KINDS.index(kind)


def unshare(flags: int) -> None:
    """Move to new namespaces. Raises: OSError."""
    _call("unshare", ctypes.c_int(flags))


def mount(source: str, target: str, *, kind: str | None = None, flags: int = 0) -> None:
    """Call mount(2). Raises: OSError."""
    words = (None if word is None else os.fsencode(word) for word in (source, target, kind))
    _call("mount", *words, ctypes.c_ulong(flags), None)


def enter(path: str) -> None:
    """Enter the namespace behind a file such as /proc/PID/ns/net. Raises: OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", ctypes.c_int(fd), ctypes.c_int(0))
    finally:
        os.close(fd)


def enter_node(keeper: int, node: int) -> None:
    """Become a process of a node; keeper is the process that holds the cluster, as /proc numbers it here.

    Keeps the working directory. Raises: OSError.
    """
    # entering a mount namespace moves a process to its root
    folder = os.getcwd()
    for kind in KINDS:
        enter(f"/proc/{keeper}/fd/{node_fd(node, kind)}")
    os.chdir(folder)


def enter_cluster(keeper: int) -> None:
    """Put later children of this process into the cluster, in the user namespace of its owner.

    This process must have one thread, and can start none afterwards. Raises: OSError; also if keeper's number belongs
    to another process by now: a signal for the cluster must never reach a process outside it.
    """
    # as root there is no user namespace of the cluster, and setns refuses the current one
    if os.stat(f"/proc/{keeper}/ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino:
        enter(f"/proc/{keeper}/ns/user")
    enter(f"/proc/{keeper}/ns/pid")
    if os.stat("/proc/self/ns/pid_for_children").st_ino == os.stat("/proc/self/ns/pid").st_ino:
        raise OSError(errno.ESRCH, os.strerror(errno.ESRCH), f"keeper {keeper}")


def become_root() -> None:
    """Enter a new user namespace, in which this user is root. Raises: OSError."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEWUSER)
    # in this order: without root the kernel accepts a gid_map only after setgroups is denied
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
