"""A logger whose server may be slow or away: a thread of its own sends the figures, so no step waits."""

from collections.abc import Callable, Mapping
from queue import Queue
from threading import Thread
from typing import Protocol

from bigbatch.errors import first_line

CLOSE_SECONDS = 60.0
"""How long the end of a run waits for unsent data."""

Say = Callable[[str], None]


class Session(Protocol):
    """A run at a server, or in its files; all calls are made by one thread."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send figures by name."""

    def finish(self) -> None:
        """End the run, once all is sent."""


class BackgroundLogger:
    """Passes figures to a thread that opens a session and sends them; its news are printed by the next call."""

    def __init__(self, name: str, open_session: Callable[[Say], Session], *, say: Say) -> None:
        """Start the thread. open_session: gets a function that takes news."""
        self._open, self._say = open_session, say
        self._news: list[str] = []
        self._error: BaseException | None = None
        self._figures: Queue[tuple[int, dict[str, float]] | None] = Queue()
        self._thread = Thread(target=self._speak, name=name, daemon=True)
        self._thread.start()

    def _speak(self) -> None:
        try:
            session = self._open(self._news.append)
            while (figures := self._figures.get()) is not None:
                session.log(*figures)
            session.finish()
        except BaseException as error:  # SystemExit, too, would end only this thread
            self._error = error

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Pass the figures to the thread. Raises: RuntimeError with the thread's error."""
        self._tell()
        self._figures.put((step, {f"{kind}/{name}": value for name, value in figures.items()}))

    def close(self) -> None:
        """Wait until all is sent, at most CLOSE_SECONDS. Raises: RuntimeError with the thread's error; TimeoutError."""
        self._figures.put(None)
        self._thread.join(CLOSE_SECONDS)
        self._tell()
        if self._thread.is_alive():
            raise TimeoutError(f"it has not sent all of its records {CLOSE_SECONDS:g} s after the run's end")

    def _tell(self) -> None:
        """Print news on the run's main thread, which owns the terminal."""
        while self._news:
            self._say(self._news.pop(0))
        if self._error:
            raise RuntimeError(first_line(self._error)) from self._error
