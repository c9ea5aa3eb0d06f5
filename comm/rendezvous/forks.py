"""Connections that end with their process, whatever it has forked."""

import os
import socket
from weakref import WeakSet

_STREAMS: "WeakSet[socket.socket]" = WeakSet()


def end_with_process(stream: socket.socket) -> socket.socket:
    """Return the connection, which no process that is forked later keeps open.

    Loaders fork workers, and these outlive a rank that is killed: the other end would take it for alive.
    """
    _STREAMS.add(stream)
    return stream


def _close_in_child() -> None:
    for stream in list(_STREAMS):
        stream.close()


os.register_at_fork(after_in_child=_close_in_child)
