"""Copies that the users of a node share: complete or not visible, readable by all, trusted by their owner alone."""

import os
import stat

import pytest
import sample_images
from error_texts import naming
from other_users import ALICE, BOB, MALLORY, as_user, needs_root, open_folder_of_all

from bigbatch.errors import ConfigError, DataError
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.datasets import stage as stage_module
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.datasets.stage import stage
from bigbatch.trainer.datasets.verify_shards import verify
from bigbatch.trainer.input import owners
from bigbatch.trainer.input.data_root import open_split
from bigbatch.trainer.input.storage import BlockCache

IMAGES = {
    f"{split}/a/{n}.jpg": sample_images.encoded(sample_images.smooth_image(n))
    for split in ("train", "val")
    for n in (1, 2)
}


@pytest.fixture
def node():
    with open_folder_of_all() as folder:
        pack(sample_images.write(folder / "folders", IMAGES), folder / "packed", recipe=PackRecipe())
        (folder / "scratch").mkdir()
        (folder / "scratch").chmod(0o1777)
        yield folder


def modes(folder):
    return {str(path.relative_to(folder.parent)): stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}


def says(text, *parts):
    return all(str(part) in str(text) for part in parts)


def staging(node, target, **how):
    """Return a function that stages; its modules are loaded here, since other users may not read them."""
    stage(node / "packed", node / "loaded")
    open_split(node / "loaded", "train").read(0)
    return lambda: stage(node / "packed", node / target, **how).bytes_copied


@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_shared_copy_is_readable_by_all_and_writable_by_its_user(node, umask):
    before = os.umask(umask)
    try:
        stage(node / "packed", node / "scratch/copy", shared_by=[])
    finally:
        os.umask(before)
    found = modes(node / "scratch/copy")
    assert {found["copy/train"], found["copy/val"]} == {0o755}
    assert {mode for name, mode in found.items() if "/" in name[5:]} == {0o644}
    assert sorted(path.name for path in (node / "scratch/copy").iterdir()) == ["train", "val"]
    assert stat.S_IMODE((node / "scratch/copy").stat().st_mode) == 0o755
    assert verify(node / "scratch/copy") == len(IMAGES)


def test_shared_copy_is_complete_or_not_visible(node, monkeypatch):
    target, seen = node / "scratch/copy", []
    finish = stage_module._finish
    monkeypatch.setattr(
        stage_module, "_finish", lambda plan: (seen.append(sorted(p.name for p in target.iterdir())), finish(plan))
    )
    stage(node / "packed", target, shared_by=[])
    hidden = [f".{split}.{os.geteuid()}.unfinished" for split in ("train", "val")]
    assert seen == [hidden, hidden]

    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    other = node / "scratch/other"
    with pytest.raises(KeyboardInterrupt):
        stage(node / "packed", other, shared_by=[], on_progress=interrupt)
    assert sorted(path.name for path in other.iterdir()) == hidden
    assert stat.S_IMODE((other / hidden[0]).stat().st_mode) == 0o700
    stage(node / "packed", other, shared_by=[])
    assert sorted(path.name for path in other.iterdir()) == ["train", "val"]


def test_shared_copy_of_what_was_private_or_unfinished(node):
    """The same folder, staged before for this user alone: nothing is copied twice."""
    target = node / "scratch/copy"
    stage(node / "packed", target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    assert stage(node / "packed", target, shared_by=[]).bytes_copied == 0
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    (target / "train/index.json").unlink()
    (target / "val/shard-000000.tar").chmod(0o666)
    summary = stage(node / "packed", target, shared_by=[])
    sizes = {split: sum(f.stat().st_size for f in (target / split).glob("[is]*[yr]")) for split in ("train", "val")}
    assert (summary.bytes_kept, summary.bytes_copied) == (sizes["train"], sizes["val"]), (
        "the published one is copied again"
    )
    assert modes(target)["copy/val/shard-000000.tar"] == 0o644
    assert sorted(path.name for path in target.iterdir()) == ["train", "val"]


def test_shared_copy_stays_until_a_new_one_replaces_it(node, monkeypatch):
    target = node / "scratch/copy"
    pack(sample_images.write(node / "others", dict(list(IMAGES.items())[::2])), node / "B", recipe=PackRecipe())
    stage(node / "packed", target, shared_by=[])
    before = modes(target)
    with pytest.raises(DataError, match=naming(target / "train", "does not come from")):
        stage(node / "B", target, shared_by=[])
    assert modes(target) == before
    (target / "train/shard-000000.tar").unlink()
    finish = stage_module._finish
    monkeypatch.setattr(stage_module, "_finish", lambda plan: ((target / "train/index.json").stat(), finish(plan)))
    stage(node / "packed", target, shared_by=[])
    assert modes(target) == before


def test_shared_copy_that_others_cannot_reach_is_refused(node):
    closed = node / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(DataError, match=naming(closed / "copy", f"through {closed}", "another DST")):
        stage(node / "packed", closed / "copy", shared_by=[])


def test_shared_copy_names_owners(tmp_path):
    with pytest.raises(ConfigError, match=naming("data.shared_by", "--owner", "no user nosuchuser")):
        owners.trusted_uids(["nosuchuser"])
    assert owners.trusted_uids(["root", "41001"]) == {os.geteuid(), 0, 41001}
    assert owners.user_name(0) == "root"
    assert owners.user_name(41009) == "41009"


def test_shared_by_in_a_config():
    quickstart = ["--config", "quickstart", "--data.shared_by", "[root]"]
    with pytest.raises(ConfigError, match=naming("data.shared_by", "data.stage or data.cache_dir")):
        load_config(quickstart)
    with pytest.raises(ConfigError, match=naming("data.shared_by", "data.keep_staged=false")):
        load_config([*quickstart, "--data.stage", "/x", "--data.keep_staged", "false"])
    assert load_config([*quickstart, "--data.stage", "/x"]).data.shared_by == ("root",)


@needs_root
def test_shared_copy_of_root_serves_all_users(node):
    as_other = staging(node, "scratch/copy", shared_by=["root"])
    assert as_other() > 0
    assert as_user(BOB, as_other) == 0
    names = sorted(name for name in IMAGES if name.startswith("train"))

    def read():
        index = open_split(node / "scratch/copy", "train")
        return [index.read(position) == IMAGES[name] for position, name in enumerate(names)]

    assert as_user(BOB, read) == [True, True]
    changes = (
        lambda: (node / "scratch/copy/train/shard-000000.tar").write_bytes(b""),
        lambda: (node / "scratch/copy/train/more").touch(),
        lambda: (node / "scratch/copy/train").rename(node / "scratch/copy/away"),
    )
    assert [as_user(BOB, change).split(":")[0] for change in changes] == ["PermissionError"] * 3


@needs_root
@pytest.mark.parametrize("prepared", [None, 0o1777])
def test_shared_copy_of_a_first_user_is_used_by_those_who_trust_the_user(node, prepared):
    """prepared: the mode of a folder that root made before."""
    if prepared:
        (node / "scratch/copy").mkdir()
        (node / "scratch/copy").chmod(prepared)
    as_alice = staging(node, "scratch/copy", shared_by=["root"])
    assert as_user(ALICE, as_alice) > 0
    assert (node / "scratch/copy/train").stat().st_uid == ALICE
    assert says(as_user(BOB, as_alice), node / "scratch/copy/train", f"another user ({ALICE})", "--shared --owner")
    assert as_user(BOB, staging(node, "scratch/copy", shared_by=["root", str(ALICE)])) == 0


@needs_root
def test_own_copy_of_a_first_user_is_none_for_the_second(node):
    as_other = staging(node, "scratch/copy")
    assert as_user(ALICE, as_other) > 0
    said = as_user(BOB, as_other)
    assert says(said, node / "scratch/copy/train", "Permission denied", "data stage --shared", "another folder")
    assert "data pack" not in said
    read = as_user(BOB, lambda: open_split(node / "scratch/copy", "train"))
    assert "data pack" not in read


@needs_root
def test_own_copy_in_a_prepared_folder(node):
    """Root made the folder with mode 1777, where no user can move what another user made."""
    as_other = staging(node, "scratch")
    assert as_user(ALICE, as_other, umask=0o000) > 0
    assert (node / "scratch/train").stat().st_uid == ALICE
    assert not stat.S_IMODE((node / "scratch/train").stat().st_mode) & owners.WRITABLE
    assert as_user(ALICE, as_other) == 0
    assert says(as_user(BOB, as_other), node / "scratch/train", f"another user ({ALICE})")


@needs_root
@pytest.mark.parametrize("shared_by", [None, ["root"]])
def test_folder_that_a_stranger_prepared_is_refused(node, shared_by):
    as_other = staging(node, "scratch/copy", shared_by=shared_by)
    as_user(MALLORY, lambda: ((node / "scratch/copy").mkdir(), (node / "scratch/copy").chmod(0o1777)))
    assert says(as_user(ALICE, as_other), node / "scratch/copy", f"another user ({MALLORY})")
    assert list((node / "scratch/copy").iterdir()) == []


@needs_root
@pytest.mark.parametrize("shared_by", [None, ["root"]])
@pytest.mark.parametrize("plant", ["copy", "link", "hidden"])
def test_splits_that_a_stranger_planted_are_refused(node, shared_by, plant):
    as_other = staging(node, "scratch", shared_by=shared_by)
    planted = {"copy": "train", "link": "train", "hidden": f".train.{ALICE}.unfinished"}[plant]

    def prepare():
        if plant == "link":
            stage(node / "packed", node / "scratch/elsewhere")
            (node / "scratch/elsewhere").chmod(0o755)
            (node / "scratch" / planted).symlink_to(node / "scratch/elsewhere/train")
        else:
            (node / "scratch" / planted).mkdir()
            (node / "scratch" / planted).chmod(0o777)

    as_user(MALLORY, prepare)
    said = as_user(ALICE, as_other)
    if plant == "hidden" and shared_by is None:
        assert said > 0, "this name is not used"
    else:
        assert says(said, node / "scratch" / planted, "its images may change")


@needs_root
def test_shared_copy_keeps_no_file_that_a_stranger_planted(node):
    target, secret = node / "scratch/copy", node / "secret"
    stage(node / "packed", target)
    (target / "train/index.json").unlink()
    for name, content in (("linked", (target / "train/shard-000000.tar").read_bytes()), ("secret", b"")):
        (node / name).write_bytes(content)
        (node / name).chmod(0o600)
    (target / "train/shard-000000.tar").unlink()
    (target / "train/shard-000000.tar").symlink_to(node / "linked")
    (target / "train/more").symlink_to(secret)
    os.chown(target / "train/index.npy", MALLORY, MALLORY)
    os.link(target / "val/index.npy", node / "second")
    (target / "val/index.json").unlink()
    assert stage(node / "packed", target, shared_by=[]).bytes_copied > 0
    assert {stat.S_IMODE((node / name).stat().st_mode) for name in ("linked", "secret")} == {0o600}
    assert not (target / "train/more").is_symlink()
    for path in target.glob("*/*"):
        assert (path.lstat().st_uid, path.lstat().st_nlink, path.is_symlink()) == (0, 1, False), path


@needs_root
def test_shared_copy_that_others_could_exchange_is_refused(node):
    """The copy was made before the folder above it, or a link to it, became unsafe."""
    (node / "above").mkdir()
    as_root = staging(node, "above/copy", shared_by=[])
    as_bob = staging(node, "above/copy", shared_by=["root"])
    as_root()
    (node / "above").chmod(0o777)
    for said in (as_user(0, as_root), as_user(BOB, as_bob)):
        assert says(said, f"{node}/above: can be changed", "chmod go-w", "another DST"), said
    (node / "above").chmod(0o1777)
    assert (as_root(), as_user(BOB, as_bob)) == (0, 0), "others may not exchange it there"
    assert as_user(0, staging(node, "scratch/new/copy", shared_by=[]), umask=0o002) > 0
    as_user(MALLORY, lambda: (node / "scratch/link").symlink_to(node / "above"))
    by_link = staging(node, "scratch/link/copy", shared_by=["root"])
    assert says(as_user(BOB, by_link), f"{node}/scratch/link: is a link of another user")
    (node / "scratch/copy").symlink_to(node / "above/copy")
    for uid in (0, BOB):
        said = as_user(uid, staging(node, "scratch/copy", shared_by=["root"]))
        assert says(said, f"{node}/scratch/copy: is a link"), said


@needs_root
def test_shared_copy_that_its_group_may_write_is_refused(node):
    as_alice = staging(node, "scratch/copy", shared_by=["root"])
    as_alice()
    (node / "scratch/copy/val/index.npy").chmod(0o664)
    assert says(as_user(BOB, as_alice), node / "scratch/copy/val/index.npy", "changed by its group")


def cache(folder, *, shared_by=None, num_blocks=16):
    return BlockCache(folder, "images", "now", num_blocks=num_blocks, shared_by=shared_by)


def block(cache):
    found = cache.get(0)
    return None if found is None else found.rstrip(b"\0")


@needs_root
def test_shared_cache_gives_blocks_of_those_who_are_trusted(node):
    folder = node / "scratch/cache"
    as_user(ALICE, lambda: cache(folder, shared_by=["root"]).put(0, b"alice's"), umask=0o077)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    trusting = ["root", str(ALICE)]
    said = as_user(BOB, lambda: block(cache(folder, shared_by=["root"])))
    assert says(said, folder, f"another user ({ALICE})", "data.cache_dir"), "who made the folder could move its files"
    assert as_user(BOB, lambda: block(cache(folder, shared_by=trusting))) == b"alice's"
    os.chown(folder, 0, 0)
    assert as_user(BOB, lambda: block(cache(folder, shared_by=["root"]))) is None
    assert as_user(BOB, lambda: block(cache(folder, shared_by=trusting, num_blocks=8))) is None
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert found == {
        f"images-now-16.{ALICE}.blocks": 0o644,
        **dict.fromkeys((f"images-now-16.{BOB}.blocks", f"images-now-8.{BOB}.blocks"), 0o644),
    }
    as_user(BOB, lambda: BlockCache(folder, "images", "later", num_blocks=16, shared_by=["root"]).num_blocks)
    assert sorted(path.name for path in folder.iterdir()) == [
        f"images-later-16.{BOB}.blocks",
        f"images-now-16.{ALICE}.blocks",
    ]


@needs_root
def test_cache_takes_no_file_that_a_stranger_planted(node):
    def plant():
        own = cache(node / "scratch/own")
        own.put(0, b"planted")
        for name in ("images-now-16.blocks", f"images-now-16.{BOB}.blocks"):
            os.link(node / "scratch/own/images-now-16.blocks", node / "scratch" / name)
            (node / "scratch" / name).chmod(0o666)

    as_user(MALLORY, plant)
    for shared_by in (None, ["root"]):
        said = as_user(BOB, lambda how=shared_by: block(cache(node / "scratch", shared_by=how)))
        assert says(said, node / "scratch", "cannot be used"), said
    as_user(ALICE, lambda: cache(node / "scratch/cache", shared_by=["root"]).put(0, b"alice's"))
    os.chown(node / "scratch/cache", 0, 0)
    (node / "scratch/cache" / f"images-now-16.{ALICE}.blocks").chmod(0o664)
    assert as_user(BOB, lambda: block(cache(node / "scratch/cache", shared_by=[str(ALICE)]))) is None


def test_own_cache_is_for_its_user_alone(tmp_path):
    cache(tmp_path / "cache").put(0, b"own")
    assert block(cache(tmp_path / "cache")) == b"own"
    assert modes(tmp_path / "cache") == {"cache/images-now-16.blocks": 0o600}
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
