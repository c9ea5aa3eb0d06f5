"""Two spellings of one class are found, and different classes are left alone."""

import pytest

from bigbatch.trainer.input.image_files import spelled_twice


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
    assert spelled_twice(names) == [line]


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
    assert spelled_twice(names) == []
