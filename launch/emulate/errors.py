"""What can go wrong with an emulated cluster."""

from bigbatch.errors import UserError


class EmulationError(UserError, RuntimeError):
    """The cluster cannot be built, found or left; the message says what to do."""
