"""Stands in for `bigbatch train` in tests of searches: evaluates a closed form of the learning rate at once.

top-1 after epoch e of n is e/n * (1 - (ln(lr / 8) / ln 8)^2), so the best learning rate is 8.
Arguments: the config's file, then options: --diverge-above LR, --epoch-seconds S, --together N (wait until N trials
have started), --hold N (trial N waits after its first epoch until it is stopped).
"""

import json
import math
import signal
import sys
import time
from pathlib import Path

import yaml

BEST_LR = 8.0


def main(argv: list[str]) -> int:
    options = dict(zip(argv[1::2], argv[2::2], strict=True))
    config = yaml.safe_load(Path(argv[0]).read_text())
    lr, epochs = config["schedule"]["base_lr"], config["run"]["epochs"]
    folder = Path(config["run"]["directory"])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(130))
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(Path(argv[0]).read_text())
    metrics = folder / "metrics.jsonl"
    first = metrics.read_text().count('"eval"') if metrics.exists() else 0
    print("starting", flush=True)
    while len(list(folder.parents[1].glob("*/log.txt"))) < int(options.get("--together", 0)):
        time.sleep(0.05)
    if lr > float(options.get("--diverge-above", "inf")):
        print(f"bigbatch: the loss is nan at step {round(lr)}: lower schedule.base_lr\nprterun: gone", flush=True)
        return 1
    for epoch in range(first + 1, epochs + 1):
        time.sleep(float(options.get("--epoch-seconds", 0)))
        top1 = epoch / epochs * (1 - (math.log(lr / BEST_LR) / math.log(8)) ** 2)
        train = {"kind": "train", "step": 10 * epoch, "epoch": float(epoch), "images_per_second": 100.0}
        record = {"kind": "eval", "step": 10 * epoch, "epoch": float(epoch), "top1": top1, "loss": 1 - top1}
        with metrics.open("a") as file:
            file.write(json.dumps(train) + "\n" + json.dumps(record) + "\n")
        while folder.parent.name == options.get("--hold", ""):
            time.sleep(60)
    (folder / "summary.json").write_text(json.dumps({"global_batch_size": 512, "num_nodes": 1, "top1": top1}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
