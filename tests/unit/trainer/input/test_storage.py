"""Shards on an S3 server (moto's) and on a web server, which fail, are slow and refuse; the oracle is the folder."""

import contextlib
import datetime
import functools
import http.server
import ipaddress
import logging
import os
import re
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_process import from_checkout
from error_texts import naming
from image_loaders import COMMON_SETTINGS, assert_same_batches
from sample_images import write

from bigbatch.cli import main
from bigbatch.errors import ConfigError, DataError, StorageError
from bigbatch.trainer.augment.crops import random_resized_crop
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.datasets.check import check_dataset
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.input import storage, webdataset, webdataset_index
from bigbatch.trainer.input.data_root import Cache, DataRoot, open_split, url_of
from bigbatch.trainer.input.order import eval_requests, read_index, train_requests
from bigbatch.trainer.input.shard_files import WEBDATASET_INDEX

s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
serving = pytest.importorskip("werkzeug.serving")
x509 = pytest.importorskip("cryptography.x509")
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

SETTINGS = COMMON_SETTINGS | {"crop": random_resized_crop(seed=7), "image_size": 64}
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
NUM_IMAGES, SHARD_BYTES = 24, 20_000
ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>the key {} is wrong</Message></Error>"


class Faults:
    """What the server does to requests of shards' bytes."""

    def __init__(self):
        self.refuse = ""  # status and code of all answers
        self.num_busy = 0  # requests to answer with 503
        self.num_broken = 0  # requests to break in the middle
        self.seconds = 0.0  # before each answer
        self.hides_missing = False  # answers 403 in place of 404, as for a bucket that may not be listed
        self.gets = []  # what was asked for

    def __call__(self, app):
        def answer(environ, start_response):
            if self.hides_missing:

                def start_hidden(status, headers, *_):
                    return start_response("403 Forbidden" if status.startswith("404") else status, headers)

                body = b"".join(app(environ, start_hidden))
                return [body.replace(b"NoSuchKey", b"AccessDenied")]
            if environ["REQUEST_METHOD"] != "GET" or not environ["PATH_INFO"].endswith((".tar", ".npy", ".json")):
                return app(environ, start_response)
            self.gets.append((environ["PATH_INFO"], environ.get("HTTP_RANGE", "")))
            time.sleep(self.seconds)
            if self.refuse or self.num_busy > 0:
                self.num_busy -= 1
                status, code = (self.refuse or "503 SlowDown").split()
                start_response(f"{status} {code}", [("Content-Type", "application/xml")])
                return [ERROR.format(code, SECRET).encode()]
            if self.num_broken > 0:
                self.num_broken -= 1

                def start_half(status, headers, *_):
                    return start_response(status, headers)

                body = b"".join(app(environ, start_half))
                return [body[: len(body) // 2]]
            return app(environ, start_response)

        return answer


@pytest.fixture(scope="module")
def faults():
    return Faults()


@pytest.fixture(scope="module")
def endpoint(faults):
    app = faults(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = serving.make_server("127.0.0.1", 0, app, threaded=True)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.fixture(autouse=True)
def account(endpoint, faults, monkeypatch, tmp_path):
    """Credentials in the environment, no faults, and a cache of indices of one's own."""
    values = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "AKIAEXAMPLE", "SECRET_ACCESS_KEY": SECRET}
    for name, value in {**values, "DEFAULT_REGION": "us-east-1", "MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(webdataset, "measured_folder", lambda name: tmp_path / "own" / name)
    faults.__init__()
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def upload(local, name, endpoint):
    fs = s3fs.S3FileSystem(key="AKIAEXAMPLE", secret=SECRET, endpoint_url=endpoint)
    fs.mkdir(name)
    fs.put(f"{local}/", f"{name}/", recursive=True)
    return Path(f"s3://{name}")


@pytest.fixture(scope="module")
def bucket(packed, endpoint):
    return upload(packed, "images", endpoint)


@pytest.fixture
def own_bucket(packed, endpoint):
    """One that a test may change."""
    OWN.append(f"own-{len(OWN)}")
    return upload(packed, OWN[-1], endpoint)


OWN = []


def held(split):
    return [split.read(position) for position in range(len(split))]


def tars(faults):
    return [path for path, _ in faults.gets if path.endswith(".tar")]


def batches(make, index, *, start_step=0):
    steps = {"start_step": start_step, "end_step": 6, "microbatches": [0]}
    asked = train_requests(seed=3, num_samples=NUM_IMAGES, global_batch_size=8, microbatch_size=8, **steps)
    return make(index, microbatch_size=8, patience_seconds=20.0).load(list(asked))


def test_storage_batches_are_those_of_the_folder_before_and_after_a_resume(make, bucket, folder, faults, tmp_path):
    cache = Cache(tmp_path / "cache", 10**9)
    for start_step in (0, 4):
        ours = open_split(bucket, "train", cache=cache)
        theirs = read_index(folder, "train")
        pair = (batches(make, index, start_step=start_step) for index in (ours, theirs))
        assert_same_batches(*pair, num_batches=6 - start_step)
    num_shards = len(ours.facts.shards)
    assert num_shards > 2
    assert len(tars(faults)) == num_shards, "each was fetched once, before the resume"


@pytest.mark.long
def test_storage_webdataset_is_indexed_once_and_read(own_bucket, folder, faults, packed, tmp_path):
    fs = s3fs.S3FileSystem()
    for split in ("train", "val"):
        for name in ("index.json", "index.npy", "pack.json"):
            fs.rm(f"{own_bucket.name}/{split}/{name}")
    with fs.open(f"{own_bucket.name}/classnames.txt", "wb") as file:
        file.write(b"a\nb\n")
    fs.invalidate_cache()
    expected = read_index(folder, "train")
    found = open_split(own_bucket, "train", classes=("a", "b"))
    assert (held(found), found.labels_N.tolist()) == (held(expected), expected.labels_N.tolist())
    assert found.name(0).startswith(f"s3://{own_bucket.name}/train/shard-000000.tar: ")
    assert DataRoot(own_bucket).classes("val") == ("a", "b")
    faults.gets.clear()
    open_split(own_bucket, "val")
    assert tars(faults) == []
    fs.put(str(packed / "val/shard-000001.tar"), f"{own_bucket.name}/train/shard-000000.tar")
    with pytest.raises(StorageError, match=naming("shard-000000.tar", "replaced")):
        held(found)


def test_storage_names_a_tar_without_an_end_mark_as_cut_off_at_once(endpoint, packed, tmp_path, monkeypatch):
    whole = (packed / "train/shard-000000.tar").read_bytes().rstrip(b"\0")
    (tmp_path / "cut/train").mkdir(parents=True)
    (tmp_path / "cut/train/0.tar").write_bytes(whole.ljust(-(-len(whole) // 512) * 512, b"\0"))
    OWN.append(f"own-{len(OWN)}")
    root = storage.Storage(str(url_of(upload(tmp_path / "cut", OWN[-1], endpoint))))
    ((name, num_bytes, _),) = root.shards("train")
    monkeypatch.setattr(storage, "RETRY_PAUSES", ())  # a fetch behind the end fails each time
    with pytest.raises(DataError, match=naming("0.tar", "is cut off", "fetch it again")):
        webdataset_index.index_shard(f"{root.url}/{name}", num_bytes, storage=root)


def test_storage_of_webdataset_is_indexed_by_one_process_and_need_not_be_listed_then(
    packed, folder, endpoint, faults, tmp_path, monkeypatch
):
    make_index = webdataset.make_index
    made = []

    def make_slowly(*args, **options):
        made.append(args)
        time.sleep(1.0)
        return make_index(*args, **options)

    monkeypatch.setattr(webdataset, "make_index", make_slowly)
    for split in ("train", "val"):
        write(tmp_path / "tars", {f"{split}/{tar.name}": tar.read_bytes() for tar in (packed / split).glob("*.tar")})
    OWN.append(f"own-{len(OWN)}")
    root = upload(tmp_path / "tars", OWN[-1], endpoint)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(webdataset.read_remote_webdataset, [storage.Storage(str(url_of(root)))] * 2))
    assert len(made) == 1
    (index,) = (tmp_path / "own/webdataset").iterdir()
    s3fs.S3FileSystem().put(str(index), f"{root.name}/{WEBDATASET_INDEX}")
    faults.hides_missing = True
    assert held(open_split(root, "train")) == held(read_index(folder, "train"))
    assert DataRoot(root).classes("val") == ("0", "1")


@pytest.mark.long
def test_storage_of_a_busy_server_and_a_broken_connection_is_read_in_the_end(make, bucket, folder, faults):
    faults.num_busy, faults.num_broken, faults.seconds = 5, 5, 0.02
    ours, theirs = open_split(bucket, "train"), read_index(folder, "train")
    assert_same_batches(batches(make, ours), batches(make, theirs), num_batches=6)
    assert faults.num_busy <= 0
    assert faults.num_broken <= 0


@pytest.mark.long
def test_storage_that_is_gone_ends_the_read_with_the_image(make, bucket, faults):
    found = open_split(bucket, "train")
    faults.refuse = "503 SlowDown"
    asked = list(eval_requests(num_samples=NUM_IMAGES, microbatch_size=4, rank=0, world_size=1))
    with pytest.raises(
        StorageError, match=naming(f"s3://{bucket.name}/train/shard-0", "image 0", "tried for")
    ) as caught:
        list(make(found, patience_seconds=0.2).load(asked))
    assert "\n" not in str(caught.value)


REFUSALS = {  # status and code of S3 -> what a user needs to hear
    "400 ExpiredToken": "token is expired",
    "400 InvalidToken": "get a new one",
    "403 RequestTimeTooSkewed": "clock",
    "403 InvalidAccessKeyId": "AWS_ACCESS_KEY_ID",
    "403 SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY",
    "403 AccessDenied": "may not read",
    "403 InvalidObjectState": "archived (Glacier): restore it",
    "404 NoSuchBucket": "no such bucket",
    "301 PermanentRedirect": "AWS_DEFAULT_REGION",
    "400 AuthorizationHeaderMalformed": "another region",
    "403 AccountProblem": "give credentials",
    "403 RequestExpired": "clock",
    "403 UserSuspended": "give credentials",
}


def test_storage_refusals_of_s3_have_each_their_sentence(endpoint, faults, bucket, monkeypatch):
    """Address, S3's code and the endpoint are named at once, and no key."""
    found = open_split(bucket, "train")
    for faults.refuse, remedy in REFUSALS.items():
        message = naming(f"s3://{bucket.name}/", remedy, faults.refuse.split()[1], endpoint)
        with pytest.raises(StorageError, match=message) as caught:
            found.read(0)
        assert SECRET not in repr(caught.value)
        assert "AKIA" not in repr(caught.value)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "ERROR", "<html>a proxy's</html>")
        faults.refuse = "403 Forbidden"
        with pytest.raises(StorageError, match=naming("give credentials", "HTTP 403", endpoint)):
            found.read(0)

    for error, remedy in (
        (RecursionError, "another region"),
        (ValueError, "check the address"),
        (ValueError, endpoint),
    ):

        def fail(*_, kind=error, **__):
            raise kind

        monkeypatch.setattr(s3fs.S3FileSystem(), "cat_file", fail)
        with pytest.raises(StorageError, match=naming(remedy, error.__name__, "AWS_DEFAULT_REGION")):
            found.read(0)


def test_storage_that_refuses_access_is_not_searched_further(bucket, endpoint, faults):
    faults.refuse = "400 AuthorizationHeaderMalformed"
    for read in (lambda: open_split(bucket, "train"), lambda: DataRoot(bucket).classes("val")):
        with pytest.raises(StorageError, match=naming(f"s3://{bucket.name}/", "another region", endpoint)) as caught:
            read()
        assert SECRET not in repr(caught.value)


def test_storage_behind_a_dead_endpoint_names_it_without_a_password(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(storage, "RETRY_PAUSES", ())
    found = storage.Storage("s3://images")
    monkeypatch.setattr(found._fs, "retries", 1)
    with pytest.raises(OSError, match=naming("no server answers", "http://127.0.0.1:9")):
        found.fetch("train/index.json")
    found._fs = SimpleNamespace(
        _s3=SimpleNamespace(meta=SimpleNamespace(endpoint_url="https://me:word@host:9/a?key=b"))
    )
    assert found._endpoint() == "https://host:9/a"


def test_storage_of_an_untrusted_certificate_names_the_variable_of_s3():
    untrusted = type("SSLError", (Exception,), {})(f"{SECRET}: [SSL: CERTIFICATE_VERIFY_FAILED]")  # as of botocore
    found = storage._without_secrets(untrusted, "https://host:9")
    assert isinstance(found, PermissionError)
    assert re.search(naming("not trusted", "SSLError of https://host:9", "AWS_CA_BUNDLE"), str(found))
    assert SECRET not in str(found)


@pytest.mark.long
def test_storage_without_credentials_says_where_they_are_looked_for(bucket, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StorageError, match=naming("AWS_ACCESS_KEY_ID")):
        open_split(bucket, "train")


class HttpError(Exception):
    """As gcsfs 2026.10 raises it: no status of aiohttp, and the server's words."""

    def __init__(self, code):
        super().__init__(f"{SECRET}, {code}")
        self.code = code


class GsBucket(MemoryFileSystem):
    """Stands in for gcsfs: it raises and logs the same errors."""

    store, pseudo_dirs = {}, [""]
    refusal = None

    def cat_file(self, path, start=None, end=None, **_):
        if self.refusal:
            logging.getLogger("gcsfs").error("_request non-retriable exception: %s", self.refusal)
            raise self.refusal
        return super().cat_file(path, start=start, end=end)


@pytest.fixture
def gs_bucket(packed, monkeypatch):
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "gs", GsBucket)
    monkeypatch.setattr(GsBucket, "store", {})
    for path in packed.rglob("*.*"):
        GsBucket().pipe_file(f"gs://images/{path.relative_to(packed)}", path.read_bytes())
    return Path("gs://images")


def test_storage_at_gs_is_read_and_listed(gs_bucket, folder, tmp_path):
    expected = held(read_index(folder, "train"))
    assert held(open_split(gs_bucket, "train", cache=Cache(tmp_path / "cache", 10**9))) == expected
    for name in ("index.json", "index.npy"):
        GsBucket().rm_file(f"gs://images/train/{name}")
    assert held(open_split(gs_bucket, "train", classes=("0", "1"))) == expected


@pytest.mark.parametrize("refusal", [OSError(f"Forbidden: images/o/x\n{SECRET}"), HttpError(401)])
def test_storage_at_gs_that_refuses_credentials_says_so_at_once_and_prints_none(
    refusal, gs_bucket, monkeypatch, capsys
):
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own; without any, Python prints errors of libraries
    monkeypatch.setattr(GsBucket, "refusal", refusal)
    with pytest.raises(StorageError, match=naming("gs://images/", "GOOGLE_APPLICATION_CREDENTIALS")) as caught:
        open_split(gs_bucket, "train")
    assert SECRET not in repr(caught.value) + capsys.readouterr().err


@pytest.mark.long
def test_storage_cache_keeps_what_fits_and_notices_damage(bucket, folder, faults, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(storage, "BLOCK_BYTES", 512)
    monkeypatch.setattr(storage, "FETCH_BLOCKS", 4)
    expected = held(read_index(folder, "train"))
    small = Cache(tmp_path / "small", 20_000)
    for _ in range(2):
        assert held(open_split(bucket, "train", cache=small)) == expected
    (kept,) = (tmp_path / "small").iterdir()
    assert kept.stat().st_blocks * 512 <= 20_000 + 8192
    assert kept.stat().st_mode & 0o077 == 0
    damaged = bytearray(kept.read_bytes())
    damaged[5000:9000] = bytes(4000)
    kept.write_bytes(damaged)
    assert held(open_split(bucket, "train", cache=small)) == expected
    large = Cache(tmp_path / "large", 10**9)
    held(open_split(bucket, "train", cache=large))
    faults.gets.clear()
    assert held(open_split(bucket, "train", cache=large)) == expected
    assert tars(faults) == []

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", full)
    assert held(open_split(bucket, "train", cache=Cache(tmp_path / "full", 10**9))) == expected
    assert capsys.readouterr().err.count("the cache keeps nothing more (No space left on device)") == 1
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=naming(tmp_path / "file", "data.cache_dir")):
        open_split(bucket, "train", cache=Cache(tmp_path / "file", 10**9))


@pytest.mark.long
def test_storage_cache_of_a_replaced_set_makes_room(own_bucket, folder, tmp_path):
    cache = Cache(tmp_path / "cache", 10**9)
    held(open_split(own_bucket, "train", cache=cache))
    (before,) = (tmp_path / "cache").iterdir()
    write(folder, {})
    pack(folder, tmp_path / "again", recipe=PackRecipe(shard_bytes=40_000))
    fs = s3fs.S3FileSystem()
    fs.put(f"{tmp_path}/again/train/", f"{own_bucket.name}/train/", recursive=True)
    fs.invalidate_cache()
    assert held(open_split(own_bucket, "train", cache=cache)) == held(read_index(folder, "train"))
    (after,) = (tmp_path / "cache").iterdir()
    assert after != before


def test_storage_cache_of_another_size_is_left_to_the_job_that_uses_it(tmp_path):
    storage.BlockCache(tmp_path, "images", "before", num_blocks=16)
    storage.BlockCache(tmp_path, "images", "now", num_blocks=16).put(0, b"kept")
    storage.BlockCache(tmp_path, "images", "now", num_blocks=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images-now-16.blocks", "images-now-8.blocks"]
    kept = storage.BlockCache(tmp_path, "images", "now", num_blocks=16).get(0)
    assert kept is not None
    assert kept.rstrip(b"\0") == b"kept"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nonesuch", "no such bucket"),
        ("empty-one", "*train*.tar"),
        ("packed-one", "holds compressed tar files, such as train-0.tar.gz"),
    ],
)
def test_storage_that_holds_no_shards_is_named(name, says):
    fs = s3fs.S3FileSystem()
    if name != "nonesuch":
        fs.mkdir(name)
    if name == "packed-one":
        fs.pipe_file(f"{name}/train-0.tar.gz", b"")
    with pytest.raises(DataError, match=naming(f"s3://{name}", says)):
        open_split(Path(f"s3://{name}"), "train")


@pytest.mark.parametrize(
    "address", ["https://me:word@host/x", "s3://key:secret@bucket/x", "https://host/x?sig=abc", "https://host/x#word@"]
)
def test_storage_addresses_hold_no_credentials(address):
    with pytest.raises(ConfigError, match=naming("user, password, query or fragment")) as caught:
        open_split(Path(address), "train")
    assert not re.search("word@|secret|abc", str(caught.value))


def test_storage_without_its_packages_names_the_extra(monkeypatch):
    config = load_config(["--config", "quickstart", "--data.root", "s3://bucket/shapes", "--data.cache_dir", "cache"])
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    for module in ("s3fs", "fsspec"):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=naming("s3://bucket/shapes", "s3fs", "'.[storage]'")):
            open_split(Path(config.data.root), "train")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--data.cache_dir", "cache"], "data.cache_dir"),
        (["--data.root", "s3://bucket/x", "--data.stage", "/scratch/x"], "data.stage"),
    ],
)
def test_config_of_keys_that_would_do_nothing(words, says):
    with pytest.raises(ConfigError, match=naming(says, "data.cache_dir")):
        load_config(["--config", "quickstart", *words])


class Ranged(http.server.SimpleHTTPRequestHandler):
    """A web server that knows ranges, unless path begins with /whole."""

    def do_GET(self):
        path = Path(self.translate_path(self.path.removeprefix("/whole")))
        if not path.is_file():
            self.send_error(404)
            return
        data, asked = path.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        is_part = asked and not self.path.startswith("/whole")
        part = data[int(asked[1]) : int(asked[2]) + 1] if is_part else data
        self.send_response(206 if is_part else 200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def web_server(handler, context=None):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http{'s' if context else ''}://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def web(packed):
    with web_server(functools.partial(Ranged, directory=str(packed))) as url:
        yield url


def test_storage_on_a_web_server(web, folder, tmp_path):
    found = open_split(Path(web), "train", cache=Cache(tmp_path, 10**9))
    assert held(found) == held(read_index(folder, "train"))
    assert found.sizes(np.array([0])).tolist() == [[70, 90]]
    with pytest.raises(StorageError, match=naming("/whole/train/shard-000000.tar", "ranges")):
        held(open_split(Path(f"{web}/whole"), "train"))


class Proxied(Ranged):
    """A proxy that has the files of http://images.invalid itself."""

    def do_GET(self):
        assert self.path.startswith("http://images.invalid/")
        self.path = self.path.removeprefix("http://images.invalid")
        super().do_GET()


def test_storage_on_the_web_is_read_through_the_proxy_of_the_environment(packed, folder, monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    with web_server(functools.partial(Proxied, directory=str(packed))) as url:
        monkeypatch.setenv("http_proxy", url)
        assert held(open_split(Path("http://images.invalid"), "train")) == held(read_index(folder, "train"))


class Listing(http.server.SimpleHTTPRequestHandler):
    """A web server that lists its folders, as HTML, which states no sizes."""

    def log_message(self, *_):
        pass


def test_storage_on_a_web_server_that_lists_shards_without_an_index_says_what_is_missing(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "train-0.tar").write_bytes(bytes(1024))
    with web_server(functools.partial(Listing, directory=str(tmp_path))) as url, pytest.raises(DataError) as raised:
        open_split(Path(url), "train")
    assert str(raised.value) == f"{url}/train/train-0.tar: the server states no size; {webdataset.REMOTE_ADVICE}"


class Busy(Ranged):
    """Answers every third request of shards' bytes with 503; all of them once is_gone."""

    num_asked, is_gone = 0, False

    def do_GET(self):
        type(self).num_asked += self.path.endswith(".tar")
        if self.path.endswith(".tar") and (self.is_gone or self.num_asked % 3 == 0):
            self.send_error(503)
        else:
            super().do_GET()


def test_storage_of_a_busy_web_server_is_checked_and_one_that_is_gone_not_for_long(packed, monkeypatch):
    monkeypatch.setattr(storage, "RETRY_PAUSES", (0.0,) * 9)
    monkeypatch.setattr(Busy, "num_asked", 0)
    monkeypatch.setattr(Busy, "is_gone", False)
    with web_server(functools.partial(Busy, directory=str(packed))) as url:
        (doubled,) = check_dataset(Path(url), decode=False).problems
        assert doubled.kind == "same image in train and val"
        assert Busy.num_asked > 2 * NUM_IMAGES
        Busy.num_asked, Busy.is_gone = 0, True
        (train, val) = check_dataset(Path(url), decode=False).problems
    assert [(each.kind, len(each.cases)) for each in (train, val)] == [("unreadable file", NUM_IMAGES)] * 2
    assert Busy.num_asked == 2 * (NUM_IMAGES + 9)


def certificate(folder):
    """Write a key and a certificate of 127.0.0.1 that it signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test's server")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
    path = folder / "certificate.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.mark.parametrize("is_trusted", [False, True])
def test_storage_over_tls(packed, tmp_path, is_trusted):
    """The library reads SSL_CERT_FILE at its import, so in a process of its own."""
    made = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made)
    with web_server(functools.partial(Ranged, directory=str(packed)), context) as url:
        done = subprocess.run(
            [sys.executable, "-m", "bigbatch", "data", "check", "--no-decode", "--workers", "1", url],
            env=from_checkout() | ({"SSL_CERT_FILE": str(made)} if is_trusted else {}),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if is_trusted:
        assert f"{2 * NUM_IMAGES} images read" in done.stdout, done.stderr
    else:
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert re.search(naming(f"{url}/train/index.json", "SSL_CERT_FILE"), done.stderr)


class Endless(http.server.BaseHTTPRequestHandler):
    """A web server that sends 256 MB of zeros, unless the connection ends before, and states no length."""

    sent_bytes = 0

    def do_GET(self):
        self.send_response(206 if "Range" in self.headers else 200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(1 << 12):
                self.wfile.write(bytes(1 << 16))
                type(self).sent_bytes += 1 << 16

    def log_message(self, *_):
        pass


def test_storage_an_index_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(storage, "LIST_BYTES", 1 << 20)
    message = naming("/train/index.json", "1,048,576 bytes", "not an index")
    with web_server(Endless) as url, pytest.raises(StorageError, match=message):
        open_split(Path(url), "train")


@pytest.mark.parametrize(("seconds", "attempts"), [(0.0, 1 + len(storage.RETRY_PAUSES)), (300.0, 1)])
def test_storage_of_a_server_that_does_not_answer_is_not_asked_for_long(seconds, attempts, monkeypatch):
    """The library gives up after 300 s; seven such attempts would be half an hour without a word."""
    now, asked = [0.0], []

    def time_out(*_):
        now[0] += seconds
        asked.append(now[0])
        raise OSError

    monkeypatch.setattr(storage.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(storage.time, "sleep", lambda _: None)
    monkeypatch.setattr(storage.Storage, "read", time_out)
    with pytest.raises(OSError):  # noqa: PT011
        storage.Storage("http://nowhere").fetch("a")
    assert len(asked) == attempts


def test_storage_reads_no_more_of_a_range_than_it_has_asked_for(monkeypatch):
    monkeypatch.setattr(Endless, "sent_bytes", 0)
    with web_server(Endless) as url, pytest.raises(StorageError, match=naming("x.bin", "ranges")):
        storage.Storage(url).read("x.bin", 100, 1000)
    assert Endless.sent_bytes < 1 << 26, "no more than the buffers of a connection"


def test_storage_of_an_index_that_is_too_long_is_refused(bucket, monkeypatch):
    monkeypatch.setattr(storage, "LIST_BYTES", 100)
    with pytest.raises(StorageError, match=naming(f"s3://{bucket.name}/train/index.json", "100 bytes")):
        open_split(bucket, "train")


@pytest.mark.long
def test_storage_trains_the_quick_start(packed, bucket, tmp_path, capsys):
    """Training by the command line from S3 and from the folder has the same losses."""
    words = ["train", "--config", "quickstart", "--data.num_classes", "2", "--run.epochs", "1"]
    words += ["--schedule.warmup_epochs", "0", "--batch.global_batch_size", "8", "--batch.microbatch_size", "8"]
    words += ["--batch.bn_span", "8", "--data.probe_seconds", "0", "--model.options.width", "4"]
    lines = []
    for root, more in ((bucket, ["--data.cache_dir", str(tmp_path / "cache")]), (packed, [])):
        directory = tmp_path / f"run{len(lines)}"
        address = str(root).replace("s3:/", "s3://")
        done = subprocess.run(
            [sys.executable, "-m", "bigbatch", *words, "--data.root", address, "--run.directory", directory, *more],
            env=from_checkout(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines.append(re.findall(r'"loss": ([0-9.]+)', (directory / "metrics.jsonl").read_text()))
    assert lines[0] == lines[1]
    assert lines[0]


def test_storage_is_no_folder_of_images_for_init(capsys):
    assert main(["init", "s3://bucket/images"]) == 1
    assert "does not exist" in capsys.readouterr().err
