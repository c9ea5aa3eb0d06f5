"""The command's exit codes other than 0; docs/failure-model.md explains them."""

FAILED = 1
"""An error that one line explains, or a check found something wrong."""
REFUSED = 2
"""The command line or a job was refused before it started: nothing was done."""
SOME_FAILED = 3
"""Some points of a sweep or trials of faults failed."""
UNFIT = 4
"""Something is wrong with a node, or between nodes."""
DIFFERENT = 5
"""Ranks hold different weights at the start, or again after a rollback; or diff or replay found a difference."""
LOST = 6
"""Another rank was lost: the same command resumes from the newest checkpoint."""
CRASHED = 7
"""Unexpected error: a defect of bigbatch, a driver or a device. A traceback shows where."""
INTERRUPTED = 130
"""Stopped by request, as by Ctrl-C; the shell's own code for it."""
PIPE_CLOSED = 141
"""The reader of the output has ended; the shell's own code for SIGPIPE."""
