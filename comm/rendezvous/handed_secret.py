"""Hand a secret from rank 0 to the other ranks of one host, for launchers that give none, such as torchrun.

Rank 0 keeps it in memory that has no path (memfd). The others read it through /proc, which the kernel allows to
processes of the same user and to root. Any process can write into the store that says where it is. So the others check
that process and memory belong to their user, and that the memory has the name of this start. The owner of the process
is not enough: a setuid program, which belongs to root, inherits open memory of the user who started it.
"""

import os
import re
from contextlib import suppress

from bigbatch.comm.rendezvous.secret import AuthenticationError, new_secret

SECRET_BYTES = 64
"""Most bytes of a secret in hexadecimal digits."""


def hand_out(session: str) -> tuple[bytes, str]:
    """Return a new secret, and where the other ranks find it. The memory stays until this process ends.

    Both are empty if this system has no such memory or no /proc: the job then has no secret, and says so.
    """
    secret = new_secret().encode()
    with suppress(AttributeError, OSError):  # not Linux, or refused by seccomp
        number = os.memfd_create(_name(session))  # closed in child processes
        os.write(number, secret)
        place = f"{os.getpid()}/fd/{number}"
        if _read(session, place) == secret:
            return secret, place
    return b"", ""


def receive(session: str, place: str) -> bytes:
    """Return the secret that rank 0 of this session has handed out; b"" if neither rank 0 nor this process could.

    Raises: AuthenticationError, also if this process could: then another process may have written that rank 0 has none.
    """
    why = "what torchrun's store says of rank 0 is not of a process of this user, or of an earlier start"
    try:
        if secret := _read(session, place):
            return secret
    except FileNotFoundError:
        why = "/proc of this rank does not show rank 0's memory"
    except OSError:
        pass
    if not place and not hand_out(session)[0]:
        return b""
    raise AuthenticationError(why)


def _read(session: str, place: str) -> bytes:
    """Return the secret at this place; b"" if it is not of this user or session. Raises: OSError."""
    if not re.fullmatch(r"[0-9a-f]{32}", session) or not re.fullmatch(r"[1-9]\d{0,9}/fd/\d{1,9}", place, re.ASCII):
        return b""
    path = f"/proc/{place}"
    is_own = os.stat(path.partition("/fd/")[0]).st_uid == os.geteuid()
    if not is_own or os.readlink(path) != f"/memfd:{_name(session)} (deleted)":
        return b""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        is_own = os.fstat(number).st_uid == os.geteuid()
        return os.pread(number, SECRET_BYTES, 0) if is_own else b""
    finally:
        os.close(number)


def _name(session: str) -> str:
    return f"bigbatch-{session}"
