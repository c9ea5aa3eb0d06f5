"""Hand a secret from rank 0 to the other ranks of one host, for launchers that give none, such as torchrun.

Rank 0 keeps it in memory that has no path (memfd). The others read it through /proc, which the kernel allows to
processes of the same user only. A store to which any process can write says where it is, so they check that the
process is their user's, and that the memory has the name of this start, which no process of another user can make.
"""

import os
import re
from contextlib import suppress

from bigbatch.comm.rendezvous.secret import new_secret

SECRET_BYTES = 64
"""Most bytes of a secret in hexadecimal digits."""


def hand_out(session: str) -> tuple[bytes, str]:
    """Return a new secret, and where the other ranks find it. The memory stays until this process ends."""
    secret = new_secret().encode()
    number = os.memfd_create(_name(session))  # closed in child processes
    os.write(number, secret)
    return secret, f"{os.getpid()}/fd/{number}"


def receive(session: str, place: str) -> bytes:
    """Return the secret that rank 0 of this session has handed out. Raises: RuntimeError."""
    if re.fullmatch(r"[0-9a-f]{32}", session) and re.fullmatch(r"[1-9]\d{0,9}/fd/\d{1,9}", place, re.ASCII):
        with suppress(OSError):
            path = f"/proc/{place}"
            is_own = os.stat(path.partition("/fd/")[0]).st_uid == os.geteuid()
            if is_own and os.readlink(path) == f"/memfd:{_name(session)} (deleted)":
                number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                try:
                    if secret := os.pread(number, SECRET_BYTES, 0):
                        return secret
                finally:
                    os.close(number)
    raise RuntimeError("what torchrun's store says of rank 0 is not of a process of this user, or of an earlier start")


def _name(session: str) -> str:
    return f"bigbatch-{session}"
