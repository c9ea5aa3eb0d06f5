"""`bigbatch preflight`: the whole preflight, or, with --short, the check of one node."""

from collections.abc import Sequence

SHORT = "--short"


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    if SHORT in argv:
        from bigbatch.tools.preflight import short

        return short.main([word for word in argv if word != SHORT])
    from bigbatch.tools.preflight import command  # torch takes seconds to import

    return command.main(argv)
