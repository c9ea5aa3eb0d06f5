"""The images of a data set: visible, of a format that is read, at any depth; links are followed, but in no circle."""

from pathlib import Path

import pytest
from sample_images import touch

from bigbatch.trainer.input.image_files import UNREAD_SUFFIXES, is_image, list_below, list_split, spelling_variants


@pytest.mark.parametrize("name", ["a.jpg", "a.JPEG", "b.jfif", "b.JPE", "b.jif", "c.b.png", "d.WebP"])
def test_image_of_each_suffix(name: str) -> None:
    assert is_image(name)


@pytest.mark.parametrize("name", ["._a.jpg", ".jpg", "jpg", "a.jpg.txt", *(f"a{each}" for each in UNREAD_SUFFIXES)])
def test_no_image(name: str) -> None:
    assert not is_image(name)


def test_contents_are_sorted_by_kind(tmp_path: Path) -> None:
    touch(tmp_path, "b.jpg", "a/c.png", "a/._c.png", ".git/d.jpg", "a/e.TIF", "a/notes.txt", "f.bmp")
    touch(
        tmp_path, "a/.x.jpg", ".idea/a.xml", "a/g.JPG2", "a/h.jpeg.1", "a/i.png~", "a/i.png.txt", "a/j.jpg.crdownload"
    )
    found = list_below(tmp_path)
    assert (found.images, found.hidden) == (["a/c.png", "b.jpg"], [".idea", "a/._c.png"])
    assert found.others == ["a/i.png.txt", "a/notes.txt"]
    renamed = ["a/g.JPG2", "a/h.jpeg.1", "a/i.png~", "a/j.jpg.crdownload"]
    hidden = {"with text after the suffix": renamed, "hidden": [".git", "a/.x.jpg"]}
    assert found.left_out() == {".tif": ["a/e.TIF"], ".bmp": ["f.bmp"], **hidden}
    assert list_split(tmp_path).left_out() == {"in no class folder": ["b.jpg", "f.bmp"], "hidden": [".git"]}
    assert list_split(tmp_path).folders == ["a"]


def test_folders_of_systems_are_hidden(tmp_path: Path) -> None:
    touch(tmp_path, "cat/1.jpg", "__MACOSX/cat/._1.jpg", "cat/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg", "cat/_1/2.jpg")
    found = list_below(tmp_path)
    assert (found.images, found.hidden, found.concealed) == (
        ["cat/1.jpg", "cat/_1/2.jpg"],
        ["__MACOSX"],
        ["cat/@eaDir"],
    )
    assert list_split(tmp_path).folders == ["cat"]


def test_links_are_followed_but_in_no_circle(tmp_path: Path) -> None:
    """torchvision and timm follow links, too, and a circle until the system refuses the path."""
    touch(tmp_path, "set/a/1.jpg", "set/a/in/2.jpg", "set/b/3.jpg", "elsewhere/4.jpg", "file.jpg")
    for link, target in {
        "a/file.jpg": "../../file.jpg",
        "a/gone.jpg": "nowhere",  # an image by its name: its reading tells
        "a/out": "../../elsewhere",
        "a/self": ".",
        "a/in/up": "../..",
        "a/b": "../b",
        "b/a": "../a",
        "a/broken": "nowhere",
        "a/forever": "forever",
        "itself": ".",
        "c": "a",
    }.items():
        (tmp_path / "set" / link).symlink_to(target)
    found = list_below(tmp_path / "set/a")
    assert found.images == ["1.jpg", "b/3.jpg", "file.jpg", "gone.jpg", "in/2.jpg", "out/4.jpg"]
    assert found.bad_links == ["b/a", "broken", "forever", "in/up", "self"]
    top = list_split(tmp_path / "set")
    assert (top.folders, top.bad_links) == (["a", "b", "c"], ["itself"])


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["café", "cafe\u0301", "tea"], "'cafe\u0301' and 'café' ('cafe\\u0301' and 'caf\\xe9')"),
        (["Cat", "cat", "CAT"], "'CAT' and 'Cat' and 'cat'"),
        (["1", "01", "10"], "'01' and '1'"),
        (["1", "1.0"], "'1' and '1.0'"),
        (["New York", "new  york"], "'New York' and 'new  york'"),
        (["abc", "\uff21bc"], "'abc' and '\uff21bc'"),  # a letter of full width
    ],
    ids=repr,
)
def test_spelled_twice(names: list[str], line: str) -> None:
    assert spelling_variants(names) == [line]


@pytest.mark.parametrize(
    "names",
    [
        [str(number) for number in range(1000)],
        [f"{number:04d}" for number in range(1000)],
        [f"n{number:08d}" for number in range(1000)],
        [*"0123456789", *map(chr, range(65, 91)), *map(chr, range(97, 123))],  # as in data sets of handwriting
        ["a1", "a01", "0", "0.5", "Maße", "Masse"],
    ],
    ids=["numbers", "padded", "wordnet", "letters", "words"],
)
def test_different_classes_are_left_alone(names: list[str]) -> None:
    assert spelling_variants(names) == []
