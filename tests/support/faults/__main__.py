"""`python -m faults run ...` or `python -m faults table FILE`, with tests/support on PYTHONPATH."""

import sys
from collections.abc import Sequence

from bigbatch.errors import INTERRUPTED, UserError, tell
from faults import campaign, table


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    command, *words = argv or ["run"]
    commands = {"run": campaign.main, "table": table.main}
    try:
        if command not in commands:
            raise UserError(f"{command} is not a command; choose one of {', '.join(commands)}")
        return commands[command](words)
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        tell(*error.args)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
