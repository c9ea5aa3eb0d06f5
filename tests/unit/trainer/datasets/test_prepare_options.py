"""`bigbatch data prepare` on the command line: what it says, what it exits with, what its help teaches."""

import os
import re
from dataclasses import replace

import pytest
from archive_writer import (
    TINY,
    TINY_IMAGENETTE,
    TINY_V2,
    TRAIN,
    imagenette_files,
    tar_of,
    v2_files,
    write_cifar,
    write_imagenette,
    write_official,
)
from error_texts import naming

from bigbatch.cli import main
from bigbatch.tools.init.command import _parser as init_parser
from bigbatch.trainer.datasets import prepare
from bigbatch.trainer.datasets import prepare_options as prepare_command
from bigbatch.trainer.datasets.prepare import CIFAR, IMAGENET, IMAGENETTE
from bigbatch.trainer.datasets.subcommands import make_parser


@pytest.fixture
def official(tmp_path):
    """A folder with the three archives, three classes small."""
    folder = tmp_path / "official"
    write_official(folder)
    return folder


@pytest.fixture
def tiny_facts(monkeypatch):
    monkeypatch.setattr(prepare, "IMAGENET", TINY)
    monkeypatch.setattr(prepare, "IMAGENET_V2", TINY_V2)
    monkeypatch.setitem(prepare.IMAGENETTE, "160px", TINY_IMAGENETTE)
    facts = {"num_classes": 3, "num_images": {"train": 5, "val": 4}}
    for number in (10, 100):
        monkeypatch.setitem(prepare.CIFAR, number, replace(CIFAR[number], **facts))


def test_prepare_the_command_for_every_data_set(tmp_path, official, tiny_facts, capsys, monkeypatch):
    write_cifar(official, 10, monkeypatch)
    write_cifar(official, 100, monkeypatch)
    write_imagenette(official, imagenette_files())
    (official / "imagenetv2-matched-frequency-format-val.tar.gz").write_bytes(tar_of(v2_files(), mode="w:gz"))
    sizes = {"imagenet": (9, 5), "cifar10": (5, 4), "cifar100": (5, 4), "imagenette": (6, 3), "imagenet-v2": (0, 6)}
    for name, (num_train, num_val) in sizes.items():
        root = tmp_path / name
        options = {"imagenette": ["--size", "160px"], "imagenet-v2": ["--classes-from", str(tmp_path / "imagenet")]}
        command = ["data", "prepare", name, str(root), "--archives", str(official), *options.get(name, [])]
        assert main(command) == 0
        out, err = capsys.readouterr()
        assert re.search(rf"^{root}: 3 classes, images: .*{num_val} in val; written in \d+\.\d s \(.*val\)$", out, re.M)
        assert f"in the config: data.root: {root}, data.num_classes: 3" in out
        steps = {"imagenet": ["train", "val"], "imagenet-v2": ["val"]}.get(name, ["train and val"])
        assert set(re.findall(r"^writing (.*):", err, re.M)) == set(steps)
        assert [len(list((root / split).rglob("*.*"))) for split in ("train", "val")] == [num_train, num_val]
        assert ("link ImageNet's there" in out) == (name == "imagenet-v2")
        assert main([*command, "--threads", "1"]) == 0
        assert "complete already" in capsys.readouterr().out


def test_prepare_failures_are_one_line_and_exit_code_1(tmp_path, official, tiny_facts, capsys):
    (official / TRAIN).write_bytes(tar_of({"n01440764.tar": b"no tar"}))
    assert main(["data", "prepare", "imagenet", str(tmp_path / "root"), "--archives", str(official)]) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("writing")]
    assert len(error) == 1
    assert error[0].startswith(f"bigbatch: {official / TRAIN}: 'n01440764.tar': ")
    assert main(["data", "prepare", "imagenet", str(tmp_path / "root"), "--archives", "x", "--check-md5"]) == 1
    assert re.search(naming("x: ", "ILSVRC2012_img_train.tar", "--archives"), capsys.readouterr().err)


@pytest.mark.parametrize(("name", "missing"), [("imagenet", "--archives"), ("imagenet-v2", "--classes-from")])
def test_prepare_options_that_cannot_be_left_out_are_asked_for(name, missing, capsys):
    given = {"--archives": "x", "--classes-from": "y"} if name == "imagenet-v2" else {}
    options = [word for option, value in given.items() if option != missing for word in (option, value)]
    with pytest.raises(SystemExit, match="2"):
        main(["data", "prepare", name, "root", *options])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: bigbatch data prepare {name} ROOT --archives FOLDER ")
    assert missing in usage
    assert missing in error


@pytest.mark.parametrize("threads", ["0", "-1"])
def test_prepare_impossible_threads_are_refused(threads, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["data", "prepare", "cifar10", "root", f"--threads={threads}"])
    assert re.search(naming("--threads", f" {threads} ", " 1 "), capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize("name", ["imagenet", "cifar10", "cifar100", "imagenette", "imagenet-v2"])
def test_prepare_help_has_an_example_that_parses(name, capsys, monkeypatch):
    with pytest.raises(SystemExit, match="0"):
        main(["data", "prepare", name, "--help"])
    example = re.search(r"^example:\n  bigbatch (.*)$", capsys.readouterr().out, re.M)[1]
    called = []
    monkeypatch.setattr(prepare_command, "_run", lambda name, arguments: called.append(arguments) or 0)
    assert main(example.split()) == 0
    assert len(called) == 1


def test_prepare_published_facts_are_torchvisions():
    from torchvision.datasets import CIFAR10 as Peer10
    from torchvision.datasets import CIFAR100 as Peer100
    from torchvision.datasets import Imagenette as PeerImagenette
    from torchvision.datasets.imagenet import ARCHIVE_META

    assert {(a.names[0], a.md5) for a in IMAGENET.archives.values()} == set(ARCHIVE_META.values())
    for number, peer in ((10, Peer10), (100, Peer100)):
        archive = CIFAR[number].archives["all"]
        assert (archive.names, archive.md5, archive.url) == ((peer.filename,), peer.tgz_md5, peer.url)
    for size, data_set in IMAGENETTE.items():
        archive = data_set.archives["all"]
        assert (archive.url, archive.md5) == PeerImagenette._ARCHIVES[size]
        assert archive.url.endswith(f"/{archive.names[0]}")
    downloaded = [each.archives["all"] for each in (*CIFAR.values(), *IMAGENETTE.values())]
    assert all(archive.url.startswith("https://") for archive in downloaded)
    assert tuple(IMAGENETTE) == prepare_command.IMAGENETTE_SIZES


@pytest.mark.parametrize("words", ["generate a", "check a", "pack a b", "stage a b", "init a"])
def test_commands_start_as_many_workers_as_this_process_may_use_cores(words, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    parser, words = (init_parser(), words[5:]) if words.startswith("init") else (make_parser(), words)
    assert parser.parse_args(words.split()).workers == 2
