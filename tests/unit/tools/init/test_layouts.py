"""What real downloads look like, as a table: their splits and classes are read right, or refused with the reason.

The images carry the truth in their names: a file is called <split>-<class>-<number>, or for a class that a table
alone states, <number>, and the table is made from the same rule as the expectation.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from error_texts import naming
from sample_images import touch

from bigbatch.errors import DataError
from bigbatch.tools.init.arrangement import arrange, split_word
from bigbatch.tools.init.columns import choose_columns
from bigbatch.tools.init.layout import FOLDERS, DatasetLayout, find_layout

NAMES = ("cat", "dog", "eel")


def expand(pattern: str) -> Iterator[str]:
    """Yield the paths of a pattern such as {a,b}/{1..3}.jpg, as a shell does."""
    if not (found := re.search(r"\{([^{}]*)\}", pattern)):
        yield pattern
        return
    first, dots, last = found[1].partition("..")
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)) if dots else ()
    for word in numbers or found[1].split(","):
        yield from expand(pattern[: found.start()] + str(word) + pattern[found.end() :])


def paths(*patterns: str) -> list[str]:
    return [path for pattern in patterns for path in expand(pattern)]


def table(header: str, line: str, numbers: Sequence[int] = range(12)) -> str:
    """Lines of a table: {n} is the number, {c} the class of three, {k} its number, {s} train, train, val in turn."""
    lines = (
        line.format(n=n, c=NAMES[n % 3], k=n % 3, s=("train", "train", "val")[n // 3 % 3], hot=one_hot(n % 3))
        for n in numbers
    )
    return "\n".join([*([header] if header else []), *lines]) + "\n"


def one_hot(at: int) -> str:
    return ",".join(str(float(at == each)) for each in range(3))


def look(
    root: Path, files: Sequence[str], tables: dict[str, str | bytes] | None = None, **options: object
) -> DatasetLayout:
    touch(root, *files)
    for name, text in (tables or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    if isinstance(options.get("labels"), str):
        options["labels"] = root / str(options["labels"])
    return find_layout(root, leave_out=False, **options)  # type: ignore[arg-type]


def problems(found: DatasetLayout) -> dict[str, int]:
    return {each.kind: len(each.cases) for each in found.findings if each.is_problem and each.cases}


def counts(found: DatasetLayout) -> dict[str, dict[str, int]]:
    if found.splits:
        return {
            split: {name: images.labels_N.tolist().count(at) for at, name in enumerate(images.classes)}
            for split, images in found.splits.items()
        }
    return {
        split: {name: len(paths) for name, paths in sorted(by_class.items())}
        for split, by_class in sorted(found.by_split.items())
    }


BOTH = {"train": {"cat": 2, "dog": 2}, "val": {"cat": 1, "dog": 1}}
ONLY_TRAIN = {"train": BOTH["train"]}
FOLDERS_OF_CLASSES = {
    "chest X-ray": (["{train,val}/{cat,dog}/train_1.jpg", "train/{cat,dog}/2.jpg", "test/{cat,dog}/1.jpg"], BOTH),
    "chest X-ray, as it is unpacked": (
        [
            "chest_xray/{train,val}/{cat,dog}/1.jpeg",
            "chest_xray/train/{cat,dog}/2.jpeg",
            "__MACOSX/chest_xray/._1.jpeg",
        ],
        BOTH,
    ),
    "upper case": (["{Train,Val}/{cat,dog}/1.jpg", "Train/{cat,dog}/2.jpg", "Test/1.jpg"], BOTH),
    "numbers and years": (["{train2017,val2017}/{cat,dog}/1.jpg", "train2017/{cat,dog}/2.jpg"], BOTH),
    "valid": (["{train,valid,test}/{cat,dog}/1.jpg", "train/{cat,dog}/2.jpg"], BOTH),
    "TRAIN, DEV": (["{TRAIN,DEV}/{cat,dog}/1.jpg", "TRAIN/{cat,dog}/2.jpg"], BOTH),
    "other words beside": (["{images_train,evaluation_set}/{cat,dog}/1.jpg", "images_train/{cat,dog}/2.jpg"], BOTH),
    "masks beside splits": (
        ["{train,val}/{cat,dog}/1.jpg", "train/{cat,dog}/2.jpg", "{train,val}_masks/{cat,dog}/1.jpg"],
        BOTH,
    ),
    "splits in wrappers": (["{train/train,val/val}/{cat,dog}/1.jpg", "train/train/{cat,dog}/2.jpg"], BOTH),
    "Open Images": (["images/{train,validation,test}/{cat,dog}/1.jpg", "images/train/{cat,dog}/2.jpg"], BOTH),
    "Intel's images": (
        [
            "seg_train/seg_train/{cat,dog}/{1..2}.jpg",
            "seg_test/seg_test/{cat,dog}/3.jpg",
            "seg_pred/seg_pred/{4..9}.jpg",
        ],
        ONLY_TRAIN,
    ),
    "cats and dogs": (
        ["training_set/training_set/{cat,dog}/{1..2}.jpg", "test_set/test_set/{cat,dog}/3.jpg"],
        ONLY_TRAIN,
    ),
    "brain tumours": (["Training/{cat,dog}/{1..2}.jpg", "Testing/{cat,dog}/1.jpg"], ONLY_TRAIN),
    "holdout": (["train/{cat,dog}/{1..2}.jpg", "holdout/{cat,dog}/1.jpg"], ONLY_TRAIN),
    "ASL's alphabet": (
        [
            "asl_alphabet_train/asl_alphabet_train/{cat,dog}/{1..2}.jpg",
            "asl_alphabet_test/asl_alphabet_test/{1..3}.jpg",
        ],
        ONLY_TRAIN,
    ),
    "Stanford's dogs": (["Images/{cat,dog}/{1..2}.jpg", "Annotation/{cat,dog}/1", "lists/train.mat"], ONLY_TRAIN),
    "CUB": (["CUB/images/{cat,dog}/{1..2}.jpg", "CUB/train_test_split.txt", "CUB/parts/parts.txt"], ONLY_TRAIN),
    "folders below classes": (["{cat,dog}/images/{1..2}.jpg"], ONLY_TRAIN),
    "a few folders of the same name below": (
        ["{cat,dog}/other/1.jpg", "a/{1,2}/1.jpg", "b/{3,4}/1.jpg", "c/{5,6}/1.jpg"],
        {"train": {"a": 2, "b": 2, "c": 2, "cat": 1, "dog": 1}},
    ),
    "folders of the same name below": (["{cat/cat,dog/dog}/{1..2}.jpg"], ONLY_TRAIN),
    "what systems leave": (
        ["{cat,dog}/{1..2}.jpg", "{cat,dog}/Thumbs.db", "{cat,dog}/desktop.ini", "cat/.ipynb_checkpoints/1.txt"],
        ONLY_TRAIN,
    ),
    "a leftover archive, a log": (["{cat,dog}/{1..2}.jpg", "flowers.tar", "flowers.tar.gz", "notes.txt"], ONLY_TRAIN),
    "a class train": (["{cat,train}/{1..2}.jpg"], {"train": {"cat": 2, "train": 2}}),
    "classes with words of splits": (
        ["{bullet train,test tube}/1.jpg"],
        {"train": {"bullet train": 1, "test tube": 1}},
    ),
    "classes with words of parts": (["{with_mask,without_mask}/1.jpg"], {"train": {"with_mask": 1, "without_mask": 1}}),
    "numbered classes": (["{c0,c1}/{1..2}.jpg"], {"train": {"c0": 2, "c1": 2}}),
}


@pytest.mark.parametrize("name", FOLDERS_OF_CLASSES)
def test_layout_of_folders(name: str, tmp_path: Path) -> None:
    patterns, expected = FOLDERS_OF_CLASSES[name]
    found = look(tmp_path, paths(*patterns))
    assert counts(found) == expected
    assert problems(found) == {}
    for split, by_class in found.by_split.items():
        for each, images in by_class.items():
            assert all(each in image.split("/") for image in images)
            assert not any({*image.split("/")} & {"test", "Testing", "holdout", "seg_test"} for image in images), split


PARTS = "--labels folders"
REFUSED = {
    "parts of HAM10000": (["HAM10000_images_part_{1,2}/{1..3}.jpg"], PARTS),
    "NIH's chest X-rays": (["images_{001..003}/images/{1..3}.png"], PARTS),
    "flat parts of a split": (["train_{1,2}/{1..3}.jpg"], PARTS),
    "folds": (["fold{1..5}/{cat,dog}/{1..3}.jpg"], PARTS),
    "folds without classes": (["fold{1..5}/{1..3}.jpg"], PARTS),
    "originals and copies": (["{original,augmented}/{cat,dog}/1.jpg"], PARTS),
    "masks": (["{images,masks}/{1..3}.png"], PARTS),
    "Oxford's pets": (["images/{cat,dog}_1.jpg", "annotations/trimaps/{cat,dog}_1.png", "annotations/list.txt"], PARTS),
    "sites": (["{north,south}/{cat,dog,eel}/1.jpg", "north/fox/1.jpg"], "such as cat/, dog/, eel/"),
    "sites with a split": (["{north,south}/train/{1..3}.jpg"], "such as train/"),
    "hospitals": (["{a,b,c,d,e}/{benign,malignant}/1.jpg"], "such as benign/, malignant/"),
    "splits in another language": (["lernen/{cat,dog,eel}/1.jpg", "pruefen/cat/1.jpg"], "such as cat/"),
    "a copy inside": (["{cat,dog,eel}/1.jpg", "flowers/{cat,dog,eel}/1.jpg"], "such as cat/, dog/, eel/"),
    "a copy beside": (["data/natural/{cat,dog}/1.jpg", "natural/{cat,dog}/1.jpg"], "such as"),
    "a repository": (["data/{train,val}/{cat,dog}/1.jpg", "docs/1.png"], "such as train/, val/"),
    "one with plots": (["images/{cat,dog}/1.jpg", "results/1.png"], "such as cat/, dog/"),
    "flat splits": (["{train,val}/{1..3}.jpg"], "--labels FILE"),
    "Stanford's cars": (["cars_train/cars_train/{1..3}.jpg", "cars_test/cars_test/1.jpg", "cars.mat"], "--labels FILE"),
    "YOLO": (["{train,valid}/images/{1..3}.jpg", "{train,valid}/labels/{1..3}.txt"], "--labels FILE"),
    "Tiny ImageNet": (["train/{n1,n2}/images/1.JPEG", "{val,test}/images/{1..3}.JPEG"], "the images of val/"),
    "Oxford's flowers": (["jpg/image_{1..8}.jpg", "imagelabels.mat"], "8 images that are in no class folder"),
    "two training splits": (["{train,Train,val}/{cat,dog}/1.jpg"], "Train/, train/ are all splits named train"),
    "two sets of splits": (["{rgb,depth}_{train,test}/{cat,dog}/1.jpg"], "several sets of splits"),
    "a split and a class": (["training/{cat,dog}/1.jpg", "eel/1.jpg"], "holds training/ and no val/"),
    "train alone": (["seg_train/seg_train/{cat,dog}/1.jpg"], "name seg_train/seg_train/, to divide"),
    "Office-31": (["{amazon,dslr,webcam}/images/{cat,dog}/1.jpg"], "such as cat/, dog/"),
    "Places": (["a/{airfield,attic}/1.jpg", "b/{bakery,beach}/1.jpg"], "a/, b/ are letters"),
    "validation alone": (["valid/{cat,dog}/1.jpg"], "no train/"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layout_that_is_refused(name: str, tmp_path: Path) -> None:
    patterns, says = REFUSED[name]
    with pytest.raises(DataError, match=naming(tmp_path, says)) as caught:
        look(tmp_path, paths(*patterns))
    assert "\n" not in str(caught.value)


def test_layout_by_folders_on_request(tmp_path: Path) -> None:
    files = paths("{original,augmented}/{cat,dog}/{1..2}.jpg")
    assert counts(look(tmp_path, files, labels=FOLDERS)) == {"train": {"original": 4, "augmented": 4}}
    log = {"log.csv": table("file,width,height", "{n}.jpg,3,4"), "more.csv": table("file,label", "{n}.jpg,x")}
    found = look(tmp_path / "a", paths("{train,val}/{cat,dog}/1.jpg", "train/{cat,dog}/2.jpg"), log, labels=FOLDERS)
    assert counts(found) == BOTH


THREE = {"train": {"cat": 4, "dog": 4, "eel": 4}}
BY_NUMBER = {"train": {"0": 4, "1": 4, "2": 4}}
SPLIT = {"train": {"cat": 3, "dog": 3, "eel": 3}, "val": {"cat": 1, "dog": 1, "eel": 1}}
TABLES = {
    "HAM10000": (
        ["HAM10000_images_part_1/ISIC_{00..05}.jpg", "HAM10000_images_part_2/ISIC_{06..11}.jpg"],
        {
            "HAM10000_metadata.csv": table("lesion_id,image_id,dx,dx_type,age", "HAM_{n},ISIC_{n:02},{c},histo,{n}"),
            "hmnist_28_28_RGB.csv": "pixel0000,pixel0001,label\n192,153,2\n25,14,2\n",
        },
        THREE,
    ),
    "Cassava": (
        ["train_images/{00..11}.jpg", "test_images/99.jpg", "label_num_to_disease_map.json"],
        {"train.csv": table("image_id,label", "{n:02}.jpg,{k}"), "sample_submission.csv": "image_id,label\n99.jpg,4\n"},
        BY_NUMBER,
    ),
    "APTOS": (
        ["train_images/a{00..11}.png", "test_images/b{0..3}.png"],
        {"train.csv": table("id_code,diagnosis", "a{n:02},{k}"), "test.csv": "id_code\nb0\nb1\n"},
        BY_NUMBER,
    ),
    "dog breeds": (
        ["train/a{00..11}.jpg", "test/b{0..3}.jpg"],
        {"labels.csv": table("id,breed", "a{n:02},{c}"), "sample_submission.csv": "id,cat,dog\nb0,0.5,0.5\n"},
        THREE,
    ),
    "GTSRB, test": (
        ["{00..11}.png"],
        {"GT.csv": table("Filename;Width;Height;Roi.X1;ClassId", "{n:02}.png;{n};30;5;{k}")},
        BY_NUMBER,
    ),
    "ISIC, one column for each class": (
        ["ISIC_Training_Input/ISIC_{00..11}.jpg"],
        {
            "GroundTruth.csv": table("image,cat,dog,eel", "ISIC_{n:02},{hot}"),
            "Metadata.csv": table("image,age_approx,sex", "ISIC_{n:02},55,female"),
        },
        THREE,
    ),
    "Roboflow": (
        ["train/a{0..8}.jpg", "valid/b{0..2}.jpg", "test/c{0..2}.jpg"],
        {
            f"{split}/_classes.csv": table("filename, cat, dog, eel", f"{letter}{{n}}.jpg, {{hot}}", range(count))
            for split, letter, count in (("train", "a", 9), ("valid", "b", 3), ("test", "c", 3))
        },
        SPLIT,
    ),
    "EuroSAT": (
        [f"{NAMES[n % 3]}/x_{n}.jpg" for n in range(15)],
        {
            f"{split}.csv": table(",Filename,Label,ClassName", "{n},{c}/x_{n}.jpg,{k},{c}", numbers)
            for split, numbers in (("train", range(9)), ("validation", range(9, 12)), ("test", range(12, 15)))
        },
        SPLIT,
    ),
    "birds": (
        ["train/{cat,dog,eel}/{0..2}.jpg", "{valid,test}/{cat,dog,eel}/0.jpg"],
        {
            "birds.csv": "class id,filepaths,labels,data set,scientific name\n"
            + "".join(
                f"{at}.0,{path},{path.split('/')[1]},{path.split('/')[0]},F. {at}\n"
                for path in paths("train/{cat,dog,eel}/{0..2}.jpg", "{valid,test}/{cat,dog,eel}/0.jpg")
                for at in [NAMES.index(path.split("/")[1])]
            )
        },
        SPLIT,
    ),
    "FER2013": (
        ["{00..17}.jpg"],
        {
            "labels.csv": table("emotion,file,Usage", "{k},{n:02}.jpg,Training")
            + table("", "{k},{n:02}.jpg,PublicTest", range(12, 15))
            + table("", "{k},{n:02}.jpg,PrivateTest", range(15, 18))
        },
        BY_NUMBER,
    ),
    "CIFAR-10 of Kaggle": (
        ["train/{0..11}.png", "test/{0..20}.png"],
        {"trainLabels.csv": table("id,label", "{n},{c}")},
        THREE,
    ),
    "Hugging Face's image folder": (
        ["train/{0..11}.jpg", "test/{0..3}.jpg"],
        {
            "train/metadata.csv": table("file_name,label", "{n}.jpg,{c}"),
            "test/metadata.csv": table("file_name,label", "{n}.jpg,{c}", range(4)),
        },
        THREE,
    ),
    "folders of patients": (
        ["p{0..3}/{0..2}.jpg"],
        {"meta.csv": table("path,target,age", "x/../p{n}/0.jpg,{c},{n}", ()) + "".join(
            f"p{p}/{n}.jpg,{NAMES[n]},50\n" for p in range(4) for n in range(3)
        )},
        THREE,
    ),
    "Imagenette's noisy labels": (
        ["{train,val}/{cat,dog}/1.JPEG", "train/{cat,dog}/2.JPEG"],
        {"noisy.csv": "path,noisy_labels_0,noisy_labels_1,is_valid\ntrain/cat/1.JPEG,cat,dog,False\n"},
        BOTH,
    ),
    "cameras beside splits": (
        ["{train,val}/{cat,dog}/1.JPEG", "train/{cat,dog}/2.JPEG"],
        {"cameras.csv": "path,camera\ntrain/cat/1.JPEG,a\n"},
        BOTH,
    ),
    "a log of a training": (
        ["cat/{1..2}.jpg", "dog/{3..4}.jpg"],
        {"log.csv": "epoch,loss,acc\n1,0.3,0.5\n2,0.3,0.6\n"},
        ONLY_TRAIN,
    ),
    "Windows' paths": (
        ["Train/{0..2}/{0..3}.png"],
        {"t.csv": "ClassId,Path\n" + "".join(f"{k},Train\\{k}\\{n}.png\n" for k in range(3) for n in range(4))},
        BY_NUMBER,
    ),
    "composed and decomposed names": (
        ["cafe\u0301_{00..11}.jpg"],
        {"t.csv": table("image,label", "caf\u00e9_{n:02}.jpg,{c}")},
        THREE,
    ),
    "no names of columns, class first": (["{00..11}.jpg"], {"t.csv": table("", "{c},{n:02}.jpg")}, THREE),
    "tabs": (["{00..11}.jpg"], {"t.tsv": table("image\tlabel", "{n:02}.jpg\t{c}")}, THREE),
    "a byte-order mark": (["{00..11}.jpg"], {"t.csv": "\ufeff" + table("image;label", "{n:02}.jpg;{c}")}, THREE),
    "empty lines first": (["{00..11}.jpg"], {"t.csv": "\n \n" + table("image;label", "{n:02}.jpg;{c}")}, THREE),
    "empty columns": (["{00..11}.jpg"], {"t.csv": table("image,label,,", "{n:02}.jpg,{c},,")}, THREE),
    "numbers alone": (["{0..11}.png"], {"t.csv": table("image,label", "{n},{k}")}, BY_NUMBER),
    "numbers of unknown columns": (["{0..11}.png"], {"t.csv": table("pic,kind", "{n},{k}")}, BY_NUMBER),
    "unnamed line numbers": (["{00..11}.jpg"], {"t.csv": table("Unnamed: 0,img,kind", "{n},{n:02}.jpg,{c}")}, THREE),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_layout_of_tables(name: str, tmp_path: Path) -> None:
    patterns, tables, expected = TABLES[name]
    found = look(tmp_path, paths(*patterns), tables)
    assert counts(found) == expected
    assert problems(found) == {}


FLAT = ["{00..11}.jpg"]
BAD_TABLES = {
    "widths in place of classes": (FLAT, table("file,width,height", "{n:02}.jpg,{n},30"), "--columns IMAGE,CLASS"),
    "no names of three columns": (FLAT, table("", "{n:02}.jpg,{c},1"), "3 columns without names"),
    "plants with several diseases": (FLAT, table("image,a,b", "{n:02}.jpg,1,1"), "line 2: has the classes ['a', 'b']"),
    "shares of classes": (FLAT, table("image,a,b", "{n:02}.jpg,0.5,0.5"), "none is known for classes"),
    "shares at the end": (
        FLAT, table("image,a,b", "{n:02}.jpg,0,1", 25 * [*range(12)]) + "11.jpg,0.5,0\n", "t.csv line 302"
    ),
    "several labels in a cell": (
        FLAT,
        table("image,labels", "{n:02}.jpg,{c}", range(11)) + "11.jpg,cat dog\n",
        "'cat dog' holds several classes",
    ),
    "NIH's findings": (
        ["images_{001,002}/images/{00..05}.png"],
        "Image Index,Finding Labels,Patient Age\n00.png,Hernia|Mass,58\n01.png,Mass,58\n",
        "no line",
    ),
    "findings": (FLAT, table("Image Index,Finding Labels", "{n:02}.jpg,{c}|Mass"), "holds several classes"),
    "ages": (FLAT, table("image,age", "{n:02}.jpg,{k}"), "none is known for classes"),
    "folds alone": (FLAT, table("image,kfold", "{n:02}.jpg,{k}"), "none is known for classes"),
    "patients": (FLAT, table("image,patient_id", "{n:02}.jpg,p{k}"), "none is known for classes"),
    "names of images": (FLAT, table("image,kind", "{n:02}.jpg,{n}"), "12 labels of 12 images"),
    "measurements": (FLAT, table("image,label", "{n:02}.jpg,0.{k}5"), "3 labels of 12 images, such as '0.05'"),
    "folders and cameras": (
        ["{cat,dog}/{0..3}.jpg"], table("file,camera", "cat/{n}.jpg,x{k}", range(4)), "--labels folders"
    ),
    "addresses": (FLAT, table("image,label", "https://host/{n:02}.jpg,{c}"), "write paths below"),
    "numbers in a set": (FLAT, table("image,label,set", "{n:02}.jpg,{c},{k}"), "'0', which is no name of a split"),
    "flags of a split": (FLAT, table("image,label,is_training", "{n:02}.jpg,{c},1"), "'1', which is no name"),
    "two columns of classes": (FLAT, table("image,label,species", "{n:02}.jpg,{n},{c}"), "'species' and 'label'"),
    "numbers of splits": (FLAT, table("image,label,split", "{n:02}.jpg,{c},0"), "'0', which is no name of a split"),
    "an unknown split": (FLAT, table("image,label,split", "{n:02}.jpg,{c},{s}") + "11.jpg,cat,x\n", "holds 'x'"),
    "one at the end": (
        FLAT, table("image,label,any", "{n:02}.jpg,{c},{s}", 25 * [*range(12)]) + "11.jpg,cat,x\n", "t.csv line 302"
    ),
    "nothing to train with": (FLAT, table("image,label,split", "{n:02}.jpg,{c},test"), "no image to train"),
    "absolute paths of another machine": (FLAT, table("image,label", "/home/me/{n:02}.jpg,{c}"), "not below"),
    "folders and widths": (
        ["{cat,dog}/{0..3}.jpg"], table("file,width,height", "cat/{n}.jpg,{n},30", range(4)), "--labels folders"
    ),
    "only line ends": (FLAT, "\n\n", "is empty"),
    "all labels empty": (FLAT, table("image,label", "{n:02}.jpg,"), "t.csv line 2: ['00.jpg', '']"),
    "one-hot without a one": (FLAT, table("image,cat,dog,owl", "{n:02}.jpg,0,0,0"), "t.csv line 2: ['00.jpg', '0'"),
    "only names of columns": (FLAT, "image,label\n", "no further line"),
    "columns of equal names": (FLAT, table("image,label,label", "{n:02}.jpg,{c},{c}"), None),
    "images that no loader reads": (["{0..3}.ppm"], table("image,label", "{n}.ppm,{c}", range(4)), "JPEG, PNG or WebP"),
    "a line without an end": (FLAT, table("image,label", "{n:02}.jpg,{c}") + "x" * 200_000, "131,072 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TABLES)
def test_layout_of_tables_that_are_refused(name: str, tmp_path: Path) -> None:
    patterns, text, says = BAD_TABLES[name]
    with pytest.raises(DataError, match=naming(tmp_path, says or "2 columns 'label'")) as caught:
        look(tmp_path, paths(*patterns), {"t.csv": text}, columns=("image", "label") if says is None else None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "num_val"),
    [
        (("train", "val"), 4), (("TRAIN", "Validation"), 4), (("training", "dev"), 4), (("Train", "hold-out"), 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("columns", [None, ("image", "label")])
def test_layout_obeys_the_column_of_splits(
    words: tuple[str, str], num_val: int, columns: tuple[str, str] | None, tmp_path: Path
) -> None:
    lines = (f"{n:02}.jpg,{NAMES[n % 3]},{words[n >= 8]},{n}\n" for n in range(12))
    found = look(tmp_path, paths(*FLAT), {"t.csv": "image,label,any,n\n" + "".join(lines)}, columns=columns)
    read = {split: sorted(path for each in by.values() for path in each) for split, by in found.by_split.items()}
    val = {"val": paths("{08..11}.jpg")} if num_val else {}
    assert read == {"train": paths("{00..07}.jpg"), **val}
    assert "not read: ['n']" in found.what


def test_layout_prefers_classes_that_are_text_and_says_if_they_are_numbers(tmp_path: Path) -> None:
    rows = [(f"n0177039{n % 3}", 70 + n % 3, NAMES[n % 3], f"{n:02}.jpg") for n in range(12)]
    texts = "".join(f"{wnid},{number},{name},{file}\n" for wnid, number, name, file in rows)
    found = look(tmp_path / "texts", paths(*FLAT), {"t.csv": "wnid,class_index,name,file\n" + texts})
    assert {*found.by_split["train"]} == {"n01770390", "n01770391", "n01770392"}
    assert "are numbers" not in found.what
    numbers = "".join(f"{number},{name},{file}\n" for _, number, name, file in rows)
    found = look(tmp_path / "numbers", paths(*FLAT), {"t.csv": "class_index,name,file\n" + numbers})
    assert {*found.by_split["train"]} == {"70", "71", "72"}
    assert "not read: ['name']; classes are numbers: --columns IMAGE,CLASS names other columns" in found.what


def test_layout_tells_all_faults_of_a_table(tmp_path: Path) -> None:
    text = table("image,label,split", "{n:02}.jpg,{c},train", range(9)) + "\n".join(
        [
            "09.jpg,NaN,train",
            "00.jpg,dog,train",
            "01.jpg,dog,val",
            "10.jpg,cat,",
            "gone.jpg,cat,train",
            "x.jpg,cat,val,9",
        ]
    )
    found = look(tmp_path, paths(*FLAT), {"t.csv": text})
    assert problems(found) == {
        "line without a label": 1, "image with two labels": 1, "image in two splits": 1, "image without a split": 1,
        "label without an image": 1, "line with too many cells": 1, "image without a label": 2,
    }  # fmt: skip
    assert counts(found) == {"train": {"cat": 2, "dog": 2, "eel": 3}}


SHARES = {"train": range(9), "val": range(6, 12)}


def test_layout_of_several_tables_needs_a_choice_or_names_of_splits(tmp_path: Path) -> None:
    one = table("image,label", "{n:02}.jpg,{c}")
    with pytest.raises(DataError, match=naming("2 CSV files (a.csv, b.csv)", "--labels")):
        look(tmp_path, paths(*FLAT), {"a.csv": one, "b.csv": one})
    assert counts(look(tmp_path, [], labels="a.csv")) == THREE
    both = {f"{split}.csv": table("image,label", "{n:02}.jpg,{c}", n) for split, n in SHARES.items()}
    found = look(tmp_path / "b", paths(*FLAT), both)
    assert problems(found) == {"image in two splits": 3}
    assert counts(found) == {"train": {"cat": 2, "dog": 2, "eel": 2}, "val": {"cat": 1, "dog": 1, "eel": 1}}


def test_layout_finds_images_by_absolute_paths_and_ends_of_paths(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files = paths("pets/{cat,dog}/{0..3}.jpg")
    for start in (f"{tmp_path}/real/", f"{tmp_path}/link/", "real/", "", "./"):
        lines = (f"{start}{path},{path.split('/')[1]}\n" for path in files)
        text = {"../t.csv": "image,label\n" + "".join(lines)}
        found = look(tmp_path / "real", files, text, labels="../t.csv")
        assert counts(found) == {"train": {"cat": 4, "dog": 4}}
    lines = (f"{path.removeprefix('pets/')},{path.split('/')[1]}\n" for path in files)
    assert counts(look(tmp_path / "real", [], {"t.csv": "image,label\n" + "".join(lines)})) == {
        "train": {"cat": 4, "dog": 4}
    }


def test_arrangement_is_decided_by_paths_alone() -> None:
    found = arrange(["x/Train/cat/1.jpg", "x/Train/dog/1.jpg", "x/Test/1.jpg"])
    assert (found.top, found.splits) == ("x", {"x/Train": "train", "x/Test": "test"})
    assert (found.classes, found.problem) == ({"train": "x/Train"}, "")
    assert [found.split_of(path) for path in ("x/Test/1.jpg", "x/Tests/1.jpg")] == ["test", ""]
    deep = arrange([f"{'a/' * 5000}{number}.jpg" for number in range(2)])
    assert deep.top.count("a") >= 4998


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train", ("train", "")), ("TestSet", ("test", "")), ("PublicTest", ("test", "")),
        ("seg_pred", ("test", "seg")), ("GTSRBTest", ("test", "gtsrb")),
        ("train_and_val", ("", "and")), ("0", ("", "")), ("Trainer", ("", "trainer")),
    ],
)  # fmt: skip
def test_split_of_a_name(name: str, split: tuple[str, str]) -> None:
    assert split_word(name) == split


def test_columns_are_chosen_without_a_line() -> None:
    chosen = choose_columns(["id", "label"], [], image=0, wanted=None)
    assert (chosen.image, chosen.labels, chosen.split) == (0, [1], None)
