"""An end for this process that nothing of it can hold up: neither a call into a driver nor Python's lock."""

import ctypes
import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager

TO_SHOW_SECONDS = 1.0
"""Between the word where each thread is and the end."""


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End this process by SIGALRM where what is inside takes longer, and show first where each thread is.

    A signal, as a launcher starts again what one has ended; faulthandler's own end has the code of a user's error.
    The system's own handling of it, whatever the script has put there: a handler in Python would wait for the lock.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    handler = library.signal(signal.SIGALRM, signal.SIG_DFL)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds + TO_SHOW_SECONDS)
    faulthandler.dump_traceback_later(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, *timer)
        library.signal(signal.SIGALRM, handler)
