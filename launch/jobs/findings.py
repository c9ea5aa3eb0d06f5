"""Collect all mistakes of a job, to report them together."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from bigbatch.errors import JobRefused, UserError

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


def as_refusal(check: Callable[Asked, Answer], *args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
    """Return a check's result. Raises: JobRefused instead of another UserError."""
    try:
        return check(*args, **kwargs)
    except JobRefused:
        raise
    except UserError as error:
        raise JobRefused(tuple(map(str, error.args))) from error


class Problems:
    """Collects errors of checks, each once; as a context manager raises JobRefused at the end if there are any."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def attempt(self, check: Callable[Asked, Answer], *args: Asked.args, **kwargs: Asked.kwargs) -> Answer | None:
        """Return a check's result, or None if it raises."""
        try:
            return as_refusal(check, *args, **kwargs)
        except JobRefused as error:
            self._found.update(dict.fromkeys(error.findings))
            return None

    @property
    def found(self) -> tuple[str, ...]:
        return tuple(self._found)

    def __enter__(self) -> "Problems":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and self._found:
            raise JobRefused(self.found)
