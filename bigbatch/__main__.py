"""Run `python -m bigbatch` like `bigbatch`: neither imports libraries from the work folder."""

import os
import sys
from contextlib import suppress

with suppress(FileNotFoundError):  # the folder was deleted: the command says so
    if sys.path[0] == os.getcwd() and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # `python -m` adds the work folder to sys.path

from bigbatch.cli import main

sys.exit(main())
