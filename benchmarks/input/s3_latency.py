"""Input wait of the quick start from an S3 server that answers late, beside the same shards on the local disk.

    python -m benchmarks.input.s3_latency --out benchmarks/results/input-s3-latency.json

The server is moto's, in this process, on the same cores as the ranks. Each repetition begins with an empty cache. The
wait is that of the whole run: the first epoch fills the cache, and later ones read it.
"""

import argparse
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import s3fs  # type: ignore[import-untyped]
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug import serving

from benchmarks.input.feed import train
from benchmarks.record import at_least, conditions, run, show, spread, write_record


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    facts, found = conditions(options), dict[str, list[float]](s3=[], disk=[])
    server = serve(options.milliseconds / 1000)
    address = f"http://127.0.0.1:{server.server_port}"
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    with tempfile.TemporaryDirectory(prefix="bigbatch-latency-") as folder:
        images, packed = f"{folder}/shapes", f"{folder}/packed"
        for words in (["generate", images], ["pack", images, packed]):
            subprocess.run([sys.executable, "-m", "bigbatch", "data", *words], check=True)
        storage = s3fs.S3FileSystem()
        storage.mkdir("quickstart")
        storage.put(packed, "quickstart/", recursive=True)
        for number in range(options.repetitions):
            cached = ["--data.root", "s3://quickstart/packed", "--data.cache_dir", f"{folder}/cache{number}"]
            turns = [("s3", cached), ("disk", ["--data.root", packed])]
            for name, overrides in random.Random(number).sample(turns, len(turns)):
                found[name].append(train(options, overrides)["input_wait_fraction"])
    server.shutdown()
    waits = {name: spread(values) for name, values in found.items()}
    for name, values in waits.items():
        print(show(name, values, unit="of the step"))
    write_record(options.out, {"benchmark": "s3_latency", "conditions": facts, "input_wait_fraction": waits})


def serve(seconds: float) -> serving.BaseWSGIServer:
    """Start an S3 server that waits before each answer."""
    app = DomainDispatcherApplication(create_backend_app)

    def late(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        time.sleep(seconds)
        return app(environ, start_response)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = serving.make_server("127.0.0.1", 0, late, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, count = parser.add_argument, at_least(1)
    add("--milliseconds", type=float, default=20.0, help="before each answer (default: %(default)s)")
    add("--ranks", type=count, default=2, help="under mpirun (default: %(default)s)")
    add("--repetitions", type=count, default=3, help="pairs of runs (default: %(default)s)")
    add(
        "--epochs",
        type=at_least(2),
        default=12,
        help="at least 2, as the rate rises for that time (default: %(default)s)",
    )
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    options = parser.parse_args(argv)
    options.overrides = ["--config", "quickstart", "--run.epochs", str(options.epochs)]
    return options


if __name__ == "__main__":
    run(main)
