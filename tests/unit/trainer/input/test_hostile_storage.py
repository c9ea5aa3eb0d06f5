"""A server of shards that answers what it likes: each read gives the right bytes, or one line says what is wrong."""

import functools
import http.server
import random
import re
import threading
import time
from pathlib import Path

import pytest

from bigbatch.errors import UserError
from bigbatch.trainer.input import storage
from bigbatch.trainer.input.data_root import open_split
from bigbatch.trainer.input.order import read_index

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("aiohttp")

NUM_IMAGES, SHARD_BYTES = 6, 4000
NUM_FAULTS = 40
GARBAGE = (b"", b"\0" * 100, b"<html>busy</html>", b"HTTP/9.9 999 \xff\r\n\r\n", b"\xff" * 4096)
CODES = (200, 204, 206, 301, 302, 304, 400, 401, 403, 404, 408, 416, 429, 500, 503, 599)
ANSWERS = (
    "code",
    "short",
    "long",
    "wrong length",
    "no length",
    "closed",
    "reset",
    "garbage",
    "slow",
    "headers",
    "loop",
)


class Hostile(http.server.BaseHTTPRequestHandler):
    """A web server that knows ranges, and disturbs a part of its answers."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments, directory, draw, share):
        self.folder, self.draw, self.share = directory, draw, share
        super().__init__(*arguments)

    def do_GET(self):
        path = Path(self.folder, self.path.lstrip("/").partition("?")[0])
        kind = self.draw.choice(ANSWERS) if self.draw.random() < self.share else ""
        data = path.read_bytes() if path.is_file() else None
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if data is not None and asked:
            data = data[int(asked[1]) : int(asked[2]) + 1]
        self.close_connection = True
        if kind in ("closed", "reset"):
            return
        if kind == "garbage":
            self.wfile.write(self.draw.choice(GARBAGE))
            return
        code = 404 if data is None else 206 if asked else 200
        body = data or b""
        if kind == "code":
            code, body = self.draw.choice(CODES), self.draw.choice(GARBAGE)
        if kind == "short":
            body = body[: len(body) // 2]
        if kind == "long":
            body += bytes(100_000)
        self.send_response(code)
        if kind == "headers":
            self.send_header("X", "a" * 70_000)
        if kind == "loop" or code in (301, 302):
            self.send_header("Location", self.path)
        if kind != "no length":
            self.send_header("Content-Length", str(len(body) * (2 if kind == "wrong length" else 1)))
        self.end_headers()
        if kind == "slow":
            time.sleep(0.2)
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.weekly) for seed in range(3, NUM_FAULTS))]
)
def test_hostile_server_gives_the_right_bytes_or_a_line(scheme, seed, folder, packed, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "RETRY_PAUSES", (0.0, 0.01))
    draw = random.Random(f"storage {seed}")
    share = draw.choice((0.1, 0.3, 1.0))
    handler = functools.partial(Hostile, directory=str(packed), draw=draw, share=share)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    if scheme == "s3":
        for name, value in {"ENDPOINT_URL": address, "ACCESS_KEY_ID": "A", "SECRET_ACCESS_KEY": "B"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        s3fs.S3FileSystem.clear_instance_cache()
        address = "s3://images"
        (tmp_path / "images").symlink_to(packed)
        handler.keywords["directory"] = str(tmp_path)
    expected = read_index(folder, "train")
    num_read, lines = 0, []
    started = time.monotonic()
    for _ in range(4):
        try:
            found = open_split(Path(address), "train")
            for position in range(len(expected)):
                try:
                    assert found.read(position) == expected.read(position)
                    num_read += 1
                except UserError as error:
                    lines.append(str(error))
        except UserError as error:
            lines.append(str(error))
    server.shutdown()
    server.server_close()
    s3fs.S3FileSystem.clear_instance_cache()
    assert num_read + len(lines) > 0
    assert [line for line in lines if "\n" in line or len(line) > 500 or "\x1b" in line] == []
    assert time.monotonic() - started < 60
