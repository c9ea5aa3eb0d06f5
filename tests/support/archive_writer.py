"""Small archives of the structure of the official ones, for the tests of `bigbatch data prepare`."""

import hashlib
import io
import tarfile
from dataclasses import replace

import numpy as np
from scipy.io import savemat
from torchvision.datasets import CIFAR10, CIFAR100

from bigbatch.trainer.datasets.archives import Archive
from bigbatch.trainer.datasets.prepare import CIFAR, IMAGENET, IMAGENET_V2, IMAGENETTE, SOURCES

KIT_IDS = {"n03000684": 1, "n01440764": 2, "n02102040": 3}  # not the order of the names
NUM_TRAIN = {"n01440764": 5, "n02102040": 1, "n03000684": 3}
GROUND_TRUTH = (2, 1, 3, 3, 2)
WNIDS = sorted(KIT_IDS)
TINY = replace(
    IMAGENET,
    archives={key: Archive(names=archive.names) for key, archive in IMAGENET.archives.items()},
    num_classes=3,
    num_images={"train": 9, "val": 5},
)
TRAIN, VAL, KIT = (archive.names[0] for archive in IMAGENET.archives.values())


def tar_of(files, *, mode="w", tar_format=tarfile.PAX_FORMAT):
    """files: name -> bytes, or a TarInfo that is added as it is."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tar_format) as tar:
        for name, data in files.items():
            info = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            content = b"" if isinstance(data, tarfile.TarInfo) else data
            info.size = len(content) or info.size
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def sized(size):
    """A member whose extended header claims this length, as any text."""
    info = tarfile.TarInfo("x")
    info.pax_headers = {"size": size}
    return info


def named(name):
    """A member that is called name by an extended header, which may hold any byte."""
    info = tarfile.TarInfo("x")
    info.pax_headers = {"path": name}
    return info


HOSTILE = {
    "absolute": ({"/etc/passwd": b"x"}, ("'/etc/passwd'", "absolute")),
    "parent": ({"a/../../x": b"x"}, ("'a/../../x'", "out")),
    "symlink": ({"x": special("x", tarfile.SYMTYPE, "/etc/passwd")}, ("'x'", "symbolic link")),
    "symlink to a folder": ({"x": special("x", tarfile.SYMTYPE, ".."), "x/y": b"y"}, ("'x'", "symbolic link")),
    "hardlink": ({"x": special("x", tarfile.LNKTYPE, "/etc/passwd")}, ("'x'", "hard link")),
    "character device": ({"x": special("x", tarfile.CHRTYPE)}, ("'x'", "device", "pipe")),
    "block device": ({"x": special("x", tarfile.BLKTYPE)}, ("'x'", "device", "pipe")),
    "pipe": ({"x": special("x", tarfile.FIFOTYPE)}, ("'x'", "device", "pipe")),
    "unknown type": ({"x": special("x", b"Z")}, ("'x'", "file")),
    "endless": ({"x": sized("9" * 20)}, ("'x'", "size")),
    "larger than any file": ({"x": sized(str(1 << 50))}, ("'x'", "size")),
    "negative": ({"x": sized("-1024")}, ("'x'", "size")),
    "sparse": ({"x": special("x", tarfile.GNUTYPE_SPARSE)}, ("'x'", "sparse")),
    "parent folder": ({"../x": special("../x", tarfile.DIRTYPE)}, ("'../x'", "out")),
    "duplicate": ({"a/x": b"1", "./a/x": b"2"}, ("'./a/x'", "twice")),
    "folder in place of a file": ({"a": special("a", tarfile.DIRTYPE), "./a": b"2"}, ("'./a'", "twice")),
    "zero byte": ({"x": named("a\0b.JPEG")}, (r"'a\x00b.JPEG'", "unprintable")),
    "escape": ({"\x1b[2J.JPEG": b"1"}, (r"'\x1b[2J.JPEG'", "unprintable")),
    "two lines": ({"../a\nb": b"1"}, (r"'../a\nb'", "out")),
}


def content(name, num_bytes=900):
    """What an image holds: bytes that no other has."""
    return (hashlib.sha256(name.encode()).digest() * (num_bytes // 32 + 1))[: num_bytes + len(name)]


def class_tars():
    images = {wnid: {f"{wnid}_{7 * n + 1}.JPEG": 0 for n in range(count)} for wnid, count in NUM_TRAIN.items()}
    return {f"{wnid}.tar": tar_of({name: content(name) for name in names}) for wnid, names in images.items()}


def val_files():
    names = [f"ILSVRC2012_val_{n:08d}.JPEG" for n in (3, 1, 2, 5, 4)]  # an archive's order is not a promise
    return {name: content(name) for name in names}


def devkit(ids=KIT_IDS, truth=GROUND_TRUTH, **replaced):
    fields = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children")
    rows = [(number, wnid, "words", "gloss", 0, np.zeros((0, 0))) for wnid, number in ids.items()]
    rows += [(len(ids) + 1, "n00001740", "a group", "gloss", 2, np.array([[1.0, 2.0]]))]
    synsets, meta = np.array(rows, [(field, object) for field in fields]).reshape(-1, 1), io.BytesIO()
    savemat(meta, {"synsets": synsets}, do_compression=True)
    folder = "ILSVRC2012_devkit_t12"
    files = {
        f"{folder}/readme.txt": b"Introduction",
        f"{folder}/data/meta.mat": meta.getvalue(),
        f"{folder}/data/ILSVRC2012_validation_ground_truth.txt": "".join(f"{n}\n" for n in truth).encode(),
    }
    changed = {f"{folder}/data/{name}": data for name, data in replaced.items()}
    return tar_of({name: data for name, data in {**files, **changed}.items() if data is not None}, mode="w:gz")


WHOLE = {TRAIN: lambda: tar_of(class_tars()), VAL: lambda: tar_of(val_files()), KIT: devkit}


def write_official(folder):
    """The three archives of ImageNet under their official names, three classes small."""
    folder.mkdir(exist_ok=True)
    for name, make in WHOLE.items():
        (folder / name).write_bytes(make())


def as_python2(value):
    """Pickle as Python 2 did for the archives: protocol 2, byte strings, arrays of the old numpy module."""
    if isinstance(value, dict):
        return b"}(" + b"".join(as_python2(k) + as_python2(v) for k, v in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(as_python2, value)) + b"e"
    if isinstance(value, str | bytes):
        data = value if isinstance(value, bytes) else value.encode()
        return b"T" + len(data).to_bytes(4, "little") + data
    if isinstance(value, int):
        return b"J" + value.to_bytes(4, "little", signed=True)
    shape = b"(" + b"".join(map(as_python2, value.shape)) + b"t"
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    return empty + b"(K\x01" + shape + dtype + b"\x89" + as_python2(value.tobytes()) + b"tb"


def batch(seed, labels, key="labels"):
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    return {"data": pixels, key: labels, "filenames": [f"{n}.png" for n in labels], "batch_label": f"batch {seed}"}


def cifar_files(number):
    """Return file in the archive -> its content: two of the five batches of CIFAR-10."""
    if number == 10:
        names = ["airplane", "automobile", "bird"]
        return {
            "batches.meta": {"label_names": names, "num_vis": 3072},
            "data_batch_2": batch(2, [0, 1]),  # not in order, as in the official archive
            "data_batch_1": batch(1, [2, 0, 1]),
            "test_batch": batch(9, [1, 2, 0, 1]),
        }
    names = ["apple", "aquarium_fish", "baby"]
    return {
        "meta": {"fine_label_names": names, "coarse_label_names": ["fish", "fruit"]},
        "train": {**batch(1, [2, 0, 1, 1, 0], "fine_labels"), "coarse_labels": [0] * 5},
        "test": {**batch(9, [1, 2, 0, 1], "fine_labels"), "coarse_labels": [1] * 4},
    }


FOLDERS = {10: "cifar-10-batches-py", 100: "cifar-100-python"}


def write_cifar(folder, number, monkeypatch, *, files=None, published=None):
    """The archive under its official name; the facts of so small a set, whose published files torchvision knows."""
    data_set = replace(CIFAR[number], num_classes=3, num_images={"train": 5, "val": 4})
    pickles = {name: pickled(value) for name, value in (files or cifar_files(number)).items()}
    folder.mkdir(exist_ok=True)
    members = {f"{FOLDERS[number]}/readme.html": b"hi", **{f"{FOLDERS[number]}/{k}": v for k, v in pickles.items()}}
    (folder / data_set.archives["all"].names[0]).write_bytes(tar_of(members, mode="w:gz"))
    peer = {10: CIFAR10, 100: CIFAR100}[number]
    md5 = {name: hashlib.md5(pickled(value)).hexdigest() for name, value in (published or cifar_files(number)).items()}
    for part in ("train_list", "test_list"):
        monkeypatch.setattr(peer, part, [[name, md5[name]] for name, _ in getattr(peer, part) if name in md5])
    monkeypatch.setattr(peer, "meta", {**peer.meta, "md5": md5[peer.meta["filename"]]})
    return data_set


def pickled(value):
    return value if isinstance(value, bytes) else b"\x80\x02" + as_python2(value) + b"."


def files_below(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def images_below(root):
    """All files but the note of where they came from."""
    return {path: data for path, data in files_below(root).items() if path != SOURCES}


def imagenette_files():
    images = {
        f"imagenette2-160/{split}/{wnid}/{split}_{wnid}_{n}.JPEG": content(f"{split}{wnid}{n}")
        for split, count in (("train", 2), ("val", 1))
        for wnid in WNIDS
        for n in range(count)
    }
    return {"imagenette2-160/noisy_imagenette.csv": b"a,b", "imagenette2-160/train/._x.JPEG": b"macOS", **images}


TINY_IMAGENETTE = replace(IMAGENETTE["160px"], num_classes=3, num_images={"train": 6, "val": 3})


TINY_V2 = replace(IMAGENET_V2, num_classes=3, num_images={"val": 6})
V2_FOLDER = "imagenetv2-matched-frequency-format-val"


def v2_files():
    return {f"{V2_FOLDER}/{label}/{n}.jpeg": content(f"{label}{n}") for label in (2, 0, 1) for n in range(2)}


def write_imagenette(folder, files):
    """The archive under its official name."""
    folder.mkdir(exist_ok=True)
    (folder / "imagenette2-160.tgz").write_bytes(tar_of(files, mode="w:gz"))
