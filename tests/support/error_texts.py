"""What tests ask of an error's text: the names and numbers a user needs, in whatever words."""

import re


def naming(*parts: object) -> str:
    """Return a pattern for `match=` that finds a text with each of the parts, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(str(part))})" for part in parts)
