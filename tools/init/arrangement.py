"""Decide by names alone what the folders of a data set are: splits, classes, or parts of a download. Reads no file."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from bigbatch.words import listed

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "trainset", "trainval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "validate", "valset", "dev", "eval", "evaluation"), "val"),
    **dict.fromkeys(("test", "testing", "testset", "hold", "holdout", "heldout", "pred", "prediction"), "test"),
}
"""Words for splits in names of folders, files and in tables -> the split."""
_FILLERS = "set data dataset folder split images image imgs img files public private out"
_GENERIC = (
    "photos jpegimages jpg jpeg png masks labels annotations trimaps segmentations raw original originals augmented "
    "resized processed preprocessed thumbnails part parts fold folds batch chunk archive volume subset samples"
)
FILLERS, GENERIC = frozenset(_FILLERS.split()), frozenset((*_FILLERS.split(), *_GENERIC.split()))
"""Words that stand beside that of a split (TestSet, test_images); words for parts of a download and kinds of files."""
AS_CLASSES = "or give --labels folders, if the folders state the classes"


@dataclass
class Tree:
    """A folder with images at any depth: the number of those directly in it, and its folders with images."""

    num_images: int = 0
    folders: dict[str, "Tree"] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrangement:
    """What the folders of a data set are; all folders are paths below it, "" for itself."""

    top: str
    """The folder that holds the splits or classes: not the data set's own if that holds nothing else."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """Folder -> its split: train, val or test; empty if the data set is not divided."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Split, or "" if there are none -> folder of its class folders; empty if the folders are not classes."""
    problem: str = ""
    """Why the folders are not classes, and what to do; "" if they are."""

    def split_of(self, path: str) -> str:
        """Return the split in whose folder an image lies; "" if in none."""
        return next((split for folder, split in self.splits.items() if path.startswith(f"{folder}/")), "")


@lru_cache(maxsize=256)
def split_word(name: str) -> tuple[str, str]:
    """Return the split that a name states, "" if none or several, and the name's other words, without numbers."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    words = re.findall(r"[^\W\d_]+", spaced.lower())
    splits = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
    others = (word for word in words if word not in SPLIT_WORDS and word not in FILLERS)
    return splits.pop() if len(splits) == 1 else "", " ".join(others)


def arrange(images: Iterable[str]) -> Arrangement:
    """Decide what the folders are that hold these images, given as paths below the data set's folder."""
    top, tree = _unwrapped("", _tree(images))
    families: dict[str, dict[str, str]] = {}
    for name in sorted(tree.folders):
        split, rest = split_word(name)
        if split:
            families.setdefault(rest, {})[name] = split
    sets = {rest: names for rest, names in families.items() if {*names.values()} > {"train"}}
    if "" in sets or len(sets) == 1:
        return _divided(top, tree, sets.get("") or next(iter(sets.values())))
    if sets:
        names = _named(name for each in sets.values() for name in each)
        problem = f"{names} are several sets of splits: name a folder that holds one"
    else:
        problem = _no_classes(top, tree)
    return Arrangement(top, problem=problem) if problem else Arrangement(top, classes={"": top})


def _tree(images: Iterable[str]) -> Tree:
    root = Tree()
    for folder, count in Counter(path.rpartition("/")[0] for path in images).items():
        tree = root
        for name in filter(None, folder.split("/")):
            tree = tree.folders.setdefault(name, Tree())
        tree.num_images = count
    return root


def _unwrapped(path: str, tree: Tree) -> tuple[str, Tree]:
    """Return the first folder that holds more than one other folder, below folders that hold nothing else."""
    while len(tree.folders) == 1 and not tree.num_images:
        ((name, below),) = tree.folders.items()
        is_wrapper = _is_generic(name) or path.rpartition("/")[2] == name  # train/train/cat
        if not is_wrapper and (split_word(name)[0] or not below.folders):
            break
        path, tree = _join(path, name), below
    return path, tree


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _is_generic(name: str) -> bool:
    words = re.findall(r"[^\W\d_]+", name.lower())
    return bool(words) and GENERIC.issuperset(words)


def _divided(top: str, tree: Tree, splits: Mapping[str, str]) -> Arrangement:
    """Return the arrangement of folders of splits; splits: their names below top -> split."""
    paths = {_join(top, name): split for name, split in splits.items()}
    read = [name for name in splits if splits[name] != "test"]
    twice = [split for split, count in Counter(map(splits.__getitem__, read)).items() if count > 1]
    if twice:
        names = _named(name for name in read if splits[name] == twice[0])
        return Arrangement(top, paths, problem=f"{names} are all splits named {twice[0]}: move all but one elsewhere")
    below = {name: _unwrapped(_join(top, name), tree.folders[name]) for name in read}
    flat = [name for name, (_, each) in below.items() if not each.folders]
    if flat:
        what = f"the images of {_named(flat)} are in no class folder, and no table names them"
        return Arrangement(top, paths, problem=f"{what}: give --labels FILE, or make a folder for each class")
    return Arrangement(top, paths, classes={splits[name]: path for name, (path, _) in below.items()})


def _no_classes(top: str, tree: Tree) -> str:
    """Return why folders that are not a complete set of splits are not classes either; "" if they are."""
    folders = tree.folders
    if tree.num_images:
        return (
            f"holds {tree.num_images:,} images that are in no class folder, and no table names them: give --labels "
            "FILE, with a line for each image (its name, its class), or move them into a folder for each class"
        )
    for name, below in folders.items():
        if below.folders and (_is_split(name) or (split_word(name)[0] and len(folders) == 1)):
            path, _ = _unwrapped(_join(top, name), below)
            is_train = split_word(name)[0] == "train"
            how = f"add that, or name {path}/, to divide its images" if is_train else "add that"
            return f"holds {name}/ and no {'val' if is_train else 'train'}/ with class folders: {how}; {AS_CLASSES}"
    if len(folders) > 1 and _are_parts(folders):
        how = "give --labels FILE, or name the folder that holds class folders"
        return f"{_named(folders)} are named as parts of a data set, not as classes: {how}; {AS_CLASSES}"
    first = {name: {each[0].lower() for each in below.folders} for name, below in folders.items()}
    if first and all(letters == {name.lower()} for name, letters in first.items()):
        how = f"move them into one folder, and name that; {AS_CLASSES}"
        return f"{_named(folders)} are letters, by which the folders below them are sorted: {how}"
    if shared := _shared_folders(folders):
        how = "name the folder of one set of classes, or call two of them train and val"
        what = f"hold folders such as {_named(shared)}, as splits and copies of a data set do"
        return f"{_named(folders)} {what}: {how}; {AS_CLASSES}"
    return ""


def _are_parts(folders: Iterable[str]) -> bool:
    if all(_is_generic(name) or _is_split(name) for name in folders):
        return True
    spelled, *others = {re.sub(r"\d+", "", name) for name in folders}
    return not others and not GENERIC.isdisjoint(re.findall(r"[^\W_]+", spelled.lower()))


def _shared_folders(folders: Mapping[str, Tree]) -> set[str]:
    """Return folders below these by which they are splits or copies of a data set, or hold such; empty if classes."""
    inner = [(name, below) for name, each in folders.items() for below in _unwrapped(name, each)[1].folders]
    for name, below in inner:
        if _is_split(below) or _is_generic(name) or (below in folders and below != name):
            return {each for holder, each in inner if holder == name}
    repeated = {below for below, count in Counter(below for _, below in inner).items() if count > 1}
    holders, sharers = {name for name, _ in inner}, {name for name, below in inner if below in repeated}
    return repeated if len(inner) > len(holders) and 2 * len(sharers) >= len(holders) else set()


def _is_split(name: str) -> bool:
    split, rest = split_word(name)
    return bool(split) and not rest


def _named(names: Iterable[str]) -> str:
    return listed([f"{name}/" for name in sorted(names)], most=3)
