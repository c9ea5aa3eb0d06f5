"""Archives that hold little and claim much: refused by name in one line, in little memory, and nothing is left."""

import gzip
import io
import tarfile
import tracemalloc

import pytest
from archive_writer import (
    FOLDERS,
    KIT,
    TINY,
    TINY_IMAGENETTE,
    V2_FOLDER,
    cifar_files,
    pickled,
    write_imagenette,
    write_official,
)

from bigbatch.cli import main
from bigbatch.trainer.datasets import prepare


def with_bomb(path, files, name, num_bytes):
    """A gzipped tar of files, then of a member of zeros: a third of a mebibyte for 300 MiB."""
    head = tarfile.TarInfo(name)
    head.size = num_bytes
    with gzip.open(path, "wb", 1) as out:
        out.write(whole_blocks(files))
        out.write(head.tobuf())
        for _ in range(num_bytes >> 20):
            out.write(bytes(1 << 20))
        out.write(bytes(1024))


def whole_blocks(files):
    """The members of a tar without the blocks that end it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        end = tar.offset
    return buffer.getvalue()[:end]


MEMBERS = {
    "imagenette": ("imagenette2-160.tgz", "imagenette2-160/train/n01440764/bomb.JPEG"),
    "imagenet": (KIT, "ILSVRC2012_devkit_t12/data/meta.mat"),
    "cifar10": ("cifar-10-python.tar.gz", f"{FOLDERS[10]}/data_batch_1"),
    "imagenet-v2": ("imagenetv2-matched-frequency.tar.gz", f"{V2_FOLDER}/0/bomb.jpeg"),
}


@pytest.mark.slow
@pytest.mark.parametrize("data_set", MEMBERS)
def test_prepare_no_member_of_any_data_set_fills_the_memory(tmp_path, data_set, monkeypatch, capsys):
    archive, member = MEMBERS[data_set]
    official, root = tmp_path / "official", tmp_path / "root"
    write_official(official)
    monkeypatch.setattr(prepare, "IMAGENET", TINY)
    monkeypatch.setattr(prepare, "read_wnids", lambda *_, **__: ["n01440764"])
    cifar = {f"{FOLDERS[10]}/{name}": pickled(value) for name, value in cifar_files(10).items() if "meta" in name}
    with_bomb(official / archive, cifar, member, 300 << 20)
    assert (official / archive).stat().st_size < 2 << 20
    options = {"imagenet-v2": ["--classes-from", "x"], "imagenette": ["--size", "160px"]}.get(data_set, [])
    tracemalloc.start()
    try:
        assert main(["data", "prepare", data_set, str(root), "--archives", str(official), *options]) == 1
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    *_, line = capsys.readouterr().err.splitlines()
    assert all(part in line for part in (archive, f"'{member}': claims 314,572,800 bytes", "50 megapixels"))
    assert not root.exists()


def test_prepare_takes_the_limit_of_an_image_from_the_command(tmp_path, capsys):
    official, root = tmp_path / "official", tmp_path / "root"
    official.mkdir()
    archive, member = MEMBERS["imagenette"]
    with_bomb(official / archive, {}, member, 5 << 20)
    command = ["data", "prepare", "imagenette", str(root), "--size", "160px", "--archives", str(official)]
    assert main([*command, "--max-megapixels", "1"]) == 1
    assert f"'{member}': claims 5,242,880 bytes, more than an image of 1 megapixels" in capsys.readouterr().err
    assert main(command) == 1
    assert "1 of 9,469 images" in capsys.readouterr().err, "the default takes it"
    assert not root.exists()


def test_prepare_members_without_number_are_refused(tmp_path, monkeypatch, capsys):
    """A compressed header takes 20 bytes: an archive of 20 MB might hold a million names."""
    official, root = tmp_path / "official", tmp_path / "root"
    monkeypatch.setitem(prepare.IMAGENETTE, "160px", TINY_IMAGENETTE)
    write_imagenette(official, {f"{number}.txt": b"" for number in range(10_100)})
    assert main(["data", "prepare", "imagenette", str(root), "--size", "160px", "--archives", str(official)]) == 1
    assert "imagenette2-160.tgz: has more than 10,018 members" in capsys.readouterr().err
    assert not root.exists()


def test_write_images_few_bytes_wait_for_their_writers(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "MAX_IN_FLIGHT_BYTES", 1000)
    done = []

    def images():
        for number in range(20):
            assert number - len(done) <= 3, "two below the bound, and one more"
            yield f"{number}.jpg", bytes(600)

    for number in prepare.write_images(tmp_path, images(), num_threads=8):
        done.append(number)
    assert done == list(range(1, 21))
    assert len(list(tmp_path.iterdir())) == 20
