"""Stands in for `bigbatch train` in tests of searches: evaluates a closed form of the learning rate at once.

top-1 after epoch e of n is e/n * (1 - (ln(lr / 8) / ln 8)^2), so the best learning rate is 8.
Options of its own: --diverge-above LR, --epoch-seconds S, --together N (wait until N trials have started), --hold N
(trial N waits after its first epoch until it is stopped).
"""

import json
import math
import signal
import sys
import time
from pathlib import Path

BEST_LR = 8.0


def main(argv: list[str]) -> int:
    options = dict(zip(argv[::2], argv[1::2], strict=True))
    lr = float(options.get("--schedule.base_lr", BEST_LR))
    epochs = int(options.get("--run.epochs", 12))
    folder = Path(options["--run.directory"])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(130))
    metrics = folder / "metrics.jsonl"
    first = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    print("starting", flush=True)
    while len(list(folder.parent.glob("trial-*/output.txt"))) < int(options.get("--together", 0)):
        time.sleep(0.05)
    if lr > float(options.get("--diverge-above", "inf")):
        print(f"bigbatch: the loss is nan at step {round(lr)}: lower schedule.base_lr\nprterun: gone", flush=True)
        return 1
    for epoch in range(first + 1, epochs + 1):
        time.sleep(float(options.get("--epoch-seconds", 0)))
        top1 = epoch / epochs * (1 - (math.log(lr / BEST_LR) / math.log(8)) ** 2)
        record = {"kind": "eval", "step": 10 * epoch, "epoch": float(epoch), "top1": top1, "loss": 1 - top1}
        with metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")
        while folder.name == f"trial-{int(options.get('--hold', 0)):04d}":
            time.sleep(60)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
