"""One seed of airbench94 in a separate process: its warm-up run and the run that follows, as a line of JSON."""

import importlib.util
import json
import sys
from typing import Any

import torch


def main(script: str, seed: int) -> None:
    """Run one seed. script: path of airbench94.py, which looks for cifar10/train.pt in the working directory."""
    torch.manual_seed(seed)
    spec = importlib.util.spec_from_file_location("airbench94", script)
    assert spec is not None
    assert spec.loader is not None
    airbench94: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(airbench94)
    seconds = []

    def keep_seconds(variables: dict[str, Any], is_final_entry: bool) -> None:
        if is_final_entry:
            seconds.append(variables["total_time_seconds"])

    airbench94.print_training_details = keep_seconds
    airbench94.main("warmup")
    top1 = airbench94.main(seed)
    print(json.dumps({"first_seconds": seconds[0], "seconds": seconds[1], "top1": top1}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
