"""The root of all errors whose one-line message is for the user, not for a developer."""


class UserError(Exception):
    """Something a user can mend; the message names the thing and what to do."""
