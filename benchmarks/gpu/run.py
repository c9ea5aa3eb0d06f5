"""The parts of benchmarks.gpu.day, measured also if there is a result of this commit.

python -m benchmarks.gpu.run --only training steps --vision vision/references/classification --out results
"""

import sys

from benchmarks.gpu.day import main

if __name__ == "__main__":
    sys.exit(main(["--again", *sys.argv[1:]]))
