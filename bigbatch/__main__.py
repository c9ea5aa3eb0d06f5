"""`python -m bigbatch` is the same as `bigbatch`."""

import sys

from bigbatch.cli import main

sys.exit(main())
