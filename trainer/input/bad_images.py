"""What happens to pictures that cannot be used: the first one ends the run, or a few are skipped."""

from collections.abc import Sequence
from threading import Lock

from bigbatch.errors import DataError


class UndecodableError(DataError):
    """Only decoding showed that the picture at position is bad."""

    def __init__(self, message: str, *, position: int) -> None:
        super().__init__(message)
        self.position = position


class BadImages:
    """Lists those of one split that this process has met. In training the next usable picture stands in for each.

    A picture is bad by its bytes and the decoder alone, so all ranks skip the same ones, in every epoch.
    """

    def __init__(self, *, max_skipped: int | None, num_images: int) -> None:
        """Set how many of num_images may be bad; max_skipped is None to end at the first one."""
        self._max_skipped = max_skipped
        self._num_images = num_images
        self._lock = Lock()
        self.reasons: dict[int, str] = {}
        """By position in the split."""

    def add(self, position: int, error: DataError) -> None:
        """Skip the picture from now on; from any thread. Raises: DataError where no more may be skipped."""
        if self._max_skipped is None:
            raise error
        with self._lock:
            number = len(self.reasons.keys() | {position})
            # what is one too many is not taken note of, so that it ends the next load, too
            if number > self._max_skipped:
                raise too_many(number, max_skipped=self._max_skipped, last=str(error)) from error
            if number == self._num_images:
                raise DataError(f"all {number} pictures of the split are bad; the last is {error}") from error
            self.reasons[position] = str(error)


def require_few(reasons: Sequence[str], *, max_skipped: int | None) -> None:
    """Raise DataError where all ranks together met more bad pictures than may be skipped."""
    if len(reasons) > (max_skipped or 0):
        raise too_many(len(reasons), max_skipped=max_skipped or 0, last=reasons[-1])


def too_many(number: int, *, max_skipped: int, last: str) -> DataError:
    """Return the error that ends a run with more bad pictures than it may skip."""
    return DataError(
        f"{number} pictures are bad, and data.max_skipped={max_skipped}: see all by `bigbatch data check`; the last is "
        f"{last}"
    )
