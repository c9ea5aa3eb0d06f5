"""The space of a search: parsing, refusals, shrinking; all against values worked out by hand."""

import pytest
from error_texts import naming

from bigbatch.errors import ConfigError
from bigbatch.experiments.search.space import SearchRange, ValueList, parse_axis, parse_space
from bigbatch.trainer.config.file import load_config


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("schedule.base_lr=log:1:40", SearchRange("schedule.base_lr", 1, 40, is_log=True, is_int=False)),
        ("optimizer.label_smoothing=linear:0:0.2", SearchRange("optimizer.label_smoothing", 0, 0.2, False, False)),
        ("augment.randaugment_ops=linear:1:4", SearchRange("augment.randaugment_ops", 1, 4, is_log=False, is_int=True)),
        ("optimizer.momentum=choice:0.9,0.95", ValueList("optimizer.momentum", ("0.9", "0.95"), is_ordered=False)),
        ("model.options.width=choice:null,8", ValueList("model.options.width", ("null", "8"), is_ordered=False)),
        ("schedule.options.power=linear:1:3", SearchRange("schedule.options.power", 1, 3, False, False)),
        (
            "optimizer.options.betas=choice:[0.9,0.99],[0.8,0.9]",
            ValueList("optimizer.options.betas", ("[0.9, 0.99]", "[0.8, 0.9]"), False),
        ),
        # five doublings of 1e-5 are 3.2e-4, a sixth would be beyond 4e-4
        (
            "optimizer.weight_decay=log2:1e-5:4e-4",
            ValueList(
                "optimizer.weight_decay", ("1e-05", "2e-05", "4e-05", "8e-05", "0.00016", "0.00032"), is_ordered=True
            ),
        ),
        ("batch.global_batch_size=log2:256:1024", ValueList("batch.global_batch_size", ("256", "512", "1024"), True)),
    ],
)
def test_space_forms(text, axis):
    assert parse_axis(text) == axis


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("schedule.base_rl=log:1:40", "unknown key schedule.base_rl; the nearest legal one is schedule.base_lr"),
        ("lr=log:1:40", "unknown key lr; the nearest legal one is schedule.base_lr"),
        ("run.epochs=linear:1:4", "the search itself sets run.epochs"),
        ("run.seed=linear:1:5", "the search itself sets run.seed"),
        ("schedule.base_lr=log2:1e-300:1e300", "1993 doublings are more than 60"),
        ("schedule.base_lr=log:0:40", "must start above 0, not at 0"),
        ("schedule.base_lr=log:40:1", "from a number to a larger one"),
        ("schedule.base_lr=log:1:2:3", "a range has two numbers; the forms are KEY=log:LOW:HIGH"),
        ("schedule.base_lr=log:low:high", "a range has two numbers"),
        ("schedule.base_lr=cubic:1:40", "'cubic' is not a kind of range; the forms are KEY=log:LOW:HIGH"),
        ("schedule.name=log:1:4", "schedule.name is not a number; list its values as schedule.name=choice:A,B"),
        ("batch.bn_span=log:1.5:4", "takes whole numbers"),
        ("optimizer.momentum=choice:0.9", "two different values or more"),
        ("optimizer.momentum=choice:0.9,0.90", "two different values or more"),
        ("optimizer.momentum=choice:[", "two different values or more"),
    ],
)
def test_space_refuses(text, complaint):
    """The catalogue of this room's messages: elsewhere only what they name is asked."""
    with pytest.raises(ConfigError) as caught:
        parse_axis(text)
    assert complaint in str(caught.value)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_space_needs_an_axis_and_names_each_key_once():
    with pytest.raises(ConfigError, match=naming("--space ", "KEY=log:LOW:HIGH")):
        parse_space(())
    with pytest.raises(ConfigError, match=naming("--space ", " schedule.base_lr ", "twice")):
        parse_space(("schedule.base_lr=log:1:2", "schedule.base_lr=log:2:4"))


@pytest.mark.parametrize(
    ("best", "low", "high"),
    [
        ("10", 10 ** (1 - 1 / 3), 10 ** (1 + 1 / 3)),  # a third of two decades, around the middle
        ("1", 1, 10 ** (2 / 3)),  # at an end the range keeps its width and stays inside
        ("90", 10 ** (4 / 3), 100),
    ],
)
def test_log_range_shrinks_to_a_third(best, low, high):
    narrowed = SearchRange("schedule.base_lr", 1, 100, is_log=True, is_int=False).narrowed(best)
    assert (narrowed.low, narrowed.high) == pytest.approx((low, high))
    assert narrowed.is_log


def test_shrink_of_other_axes():
    linear = SearchRange("optimizer.label_smoothing", 0, 0.3, is_log=False, is_int=False).narrowed("0.2")
    assert (linear.low, linear.high) == pytest.approx((0.15, 0.25))
    whole = SearchRange("augment.randaugment_ops", 1, 13, is_log=False, is_int=True).narrowed("12")
    assert (whole.low, whole.high) == (9, 13)
    grid = ValueList("batch.global_batch_size", tuple("abcdef"), is_ordered=True)
    assert [grid.narrowed(best).texts for best in "acf"] == [("a", "b"), ("b", "c"), ("e", "f")]
    assert ValueList("k", tuple("abc"), is_ordered=True).narrowed("b").texts == ("b",)
    choice = ValueList("optimizer.momentum", ("0.9", "0.95"), is_ordered=False)
    assert choice.narrowed("0.9") == choice


def test_space_keeps_the_best_in_every_round():
    axis = SearchRange("schedule.base_lr", 0.1, 30, is_log=True, is_int=False)
    for text in (axis.text(0.1), axis.text(3.14159), axis.text(30)):
        narrowed = axis.narrowed(text).narrowed(text).narrowed(text)
        assert narrowed.low <= float(text) * (1 + 1e-12)
        assert float(text) <= narrowed.high * (1 + 1e-12)


def test_space_numbers_have_few_digits_and_stay_in_the_range():
    axis = SearchRange("schedule.base_lr", 1.23456, 40.00009, is_log=True, is_int=False)
    assert axis.text(7.654321) == "7.654"
    assert float(axis.text(1.23456)) >= 1.23456
    assert float(axis.text(40.00009)) <= 40.00009
    assert SearchRange("augment.randaugment_ops", 1, 9, is_log=False, is_int=True).text(3.0) == "3"
    small = SearchRange("optimizer.weight_decay", 1e-6, 1e-3, is_log=True, is_int=False).text(3.21987e-5)
    assert load_config(["--config", "quickstart", "--optimizer.weight_decay", small]).optimizer.weight_decay == 3.22e-5


def test_end_of_a_range_is_an_edge():
    axis = SearchRange("schedule.base_lr", 1, 100, is_log=True, is_int=False)
    assert [axis.is_edge(text) for text in ("1.2", "1.3", "10", "79", "80")] == [True, False, False, False, True]
    grid = ValueList("batch.global_batch_size", ("1", "2", "4"), is_ordered=True)
    assert [grid.is_edge(text) for text in grid.texts] == [True, False, True]
    assert not ValueList("optimizer.momentum", ("0.9", "0.95"), is_ordered=False).is_edge("0.9")
