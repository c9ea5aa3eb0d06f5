"""What the command's exit codes other than 0 are; docs/failure-model.md says what they mean."""

FAILED = 1
"""One line says what to mend, or a check found something wrong."""
REFUSED = 2
"""The command line, or a job before it started: nothing was done."""
SOME_FAILED = 3
"""Some points of a sweep or trials of faults."""
UNFIT = 4
"""Something is wrong with a node, or between nodes."""
DIFFERENT = 5
"""The ranks of a run hold different weights, again."""
LOST = 6
"""Another rank was lost: nothing is to be mended, and the same command goes on from the newest checkpoint."""
CRASHED = 7
"""Nobody expected it: a defect of bigbatch, or of a driver or a device. A traceback shows where."""
INTERRUPTED = 130
"""Stopped by request; as a shell has it for a Ctrl-C."""
PIPE_CLOSED = 141
"""Nobody reads the output any more; as a shell has it for SIGPIPE."""
