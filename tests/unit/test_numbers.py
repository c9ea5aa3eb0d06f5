"""Numbers of options are what is written, or refused."""

import pytest

from bigbatch.words import NumberError, count, decimal, whole


@pytest.mark.parametrize("text", ["1_0", "010", " 1", "1 ", "\u0663", "1e3", "0x1", "", "+", "--1"])
def test_words_that_are_no_whole_number_are_refused(text: str) -> None:
    with pytest.raises(NumberError, match="invalid int value"):
        whole(text)
    if text != "1e3":
        with pytest.raises(NumberError, match="invalid float value"):
            decimal(text)


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("-7", -7), ("+12", 12), ("1.5e3", 1500.0), (".5", 0.5)])
def test_numbers_are_what_is_written(text: str, number: float) -> None:
    assert decimal(text) == number
    if isinstance(number, int):
        assert whole(text) == number


def test_counts_have_the_plural_of_their_thing() -> None:
    things = ("rank", "epoch", "batch", "microbatch", "class")
    assert [count(1, each) for each in things] == [f"1 {each}" for each in things]
    assert [count(2, each) for each in things] == ["2 ranks", "2 epochs", "2 batches", "2 microbatches", "2 classes"]
