"""Dumps of torch's flight recorder as one rank's operations; pickles that hold plain data alone."""

import io
import pickle
from collections import OrderedDict
from typing import Any

import pytest
from played_flights import play

from bigbatch.comm.rendezvous import recording
from bigbatch.comm.rendezvous.recording import NotPlain, RunsCode, late_for, load_plain, read_recording
from bigbatch.tools.explain.verdict import called_at

PLAIN = {
    "texts": ["", "x" * 300, "ü", "nccl:all_reduce"] * 2,
    "numbers": [0, -1, 255, 65536, 2**31, -(2**40), 2**62, 1.5],
    "rest": (None, True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {}, [], {"a": {"b": [[]]}}),
}


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_pickle_is_what_was_pickled(protocol: int) -> None:
    many = {**PLAIN, "many": [[k] for k in range(1000)]}
    assert load_plain(pickle.dumps(many, protocol=protocol)) == many


@pytest.mark.parametrize("value", [print, OrderedDict(a=1), {1, 2}.__class__, Exception("x"), io.StringIO, 2j])
@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_pickle_calls_nothing(value: Any, protocol: int) -> None:
    with pytest.raises(RunsCode, match="reading it would run code"):
        load_plain(pickle.dumps([value], protocol=protocol))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (pickle.dumps([1], protocol=0), "it is not a pickle"),
        (pickle.dumps([b"bytes"]), "it holds more than plain data"),
        (pickle.dumps([2**80]), "it holds more than plain data"),
        (pickle.dumps([1])[:-1], "it is cut off"),
        (b"\x80\x04X\xff\xff\xff\xffshort.", "it is cut off"),
        (b"\x80\x02Nr\x00\x00\x00\x40.", "it holds more than plain data"),  # 8 GiB to remember one
        (b"\x80\x02h\x05.", "it is damaged: Memo value not found"),
        (b"\x80\x02a.", "it is damaged"),
        (b"\x80\x09N.", "it is damaged: unsupported pickle protocol: 9"),
    ],
)
def test_plain_pickle_refuses_the_rest(data: bytes, reason: str) -> None:
    with pytest.raises(NotPlain, match=reason):
        load_plain(data)


def test_recording_takes_parts_into_their_batch() -> None:
    """Their own states stay scheduled; some releases call the end of a batch of messages a collective."""
    rank, _ = play(2)
    rank.call().coalesced(3, 4).batch(("send", 1), ("recv", 1), state="started").call(state="started")
    for end_is_message in (True, False):
        rank.entries[-2]["is_p2p"] = end_is_message
        rank.entries[-2]["collective_seq_id"] = 2
        recording = read_recording(pickle.dumps(rank.dump()))
        found = [(each.name, each.number, each.is_message, each.is_over) for each in recording.operations]
        assert found == [
            ("nccl:all_reduce", 1, False, True),
            ("nccl:ALLGATHER_coalesced", 2, False, True),
            ("nccl:coalesced", 1, True, False),
            ("nccl:all_reduce", 3, False, False),
        ]
        assert [len(each.parts) for each in recording.operations] == [0, 2, 2, 0]


def test_recording_of_a_group_made_anew_forgets_the_first() -> None:
    rank, _ = play(2, {"1": [0, 1]})
    rank.call(group="1").call(times=5)
    rank.counts.clear()
    rank.call("broadcast").call("broadcast", "started")
    found = [(each.group.name, each.number, each.name) for each in read_recording(pickle.dumps(rank.dump())).operations]
    assert found == [("1", 1, "nccl:all_reduce"), ("0", 1, "nccl:broadcast"), ("0", 2, "nccl:broadcast")]


def test_recording_counts_what_others_came_after_as_over() -> None:
    """A group runs in order, and a dump asks for the states one by one; gloo promises no order."""
    rank, _ = play(2)
    rank.call(state="started").call(state="completed").call(state="started")
    assert [each.is_over for each in read_recording(pickle.dumps(rank.dump())).operations] == [True, True, False]
    for entry in rank.entries:
        entry["profiling_name"] = "gloo:all_reduce"
    assert [each.is_over for each in read_recording(pickle.dumps(rank.dump())).operations] == [False, True, False]


@pytest.mark.parametrize("frames", [["a.py:3", 5, None, {"filename": "a.py"}], "a.py:3", {"a.py": 3}, None])
def test_recording_keeps_frames_of_the_recorders_form_only(frames: Any) -> None:
    rank, _ = play(2)
    rank.call(state="started")
    rank.entries[-1]["frames"] = frames
    (operation,) = read_recording(pickle.dumps(rank.dump())).operations
    assert called_at(operation) == ("a.py:None None" if isinstance(frames, list) else "")


def test_collective_that_is_retired_and_has_not_completed_has_timed_out() -> None:
    rank, _ = play(2)
    rank.call().call(state="started")
    rank.entries[-1]["retired"] = True
    waiting = read_recording(pickle.dumps(rank.dump())).waiting
    assert waiting is not None
    assert waiting.number == 2


def test_late_are_those_who_have_begun_less() -> None:
    assert late_for(5, [0, 1, 2, 3], {0: 5, 1: 4, 3: 9, 7: 0}) == ({1: 4}, [2])


def test_recording_refuses_a_pickle_that_refers_to_one_list_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a list of a million entries, 5 MB would take 2 GB."""
    monkeypatch.setattr(recording, "MAX_NUMBERS", 1000)
    many = list(range(1000))
    groups = {str(name): {"ranks": many} for name in range(300)}
    entry = {"process_group": ("0", ""), "profiling_name": "nccl:all_reduce", "state": "completed"}
    entry |= {"collective_seq_id": 1, "input_dtypes": ["Float"] * 1000}
    for dump in ({"pg_config": groups, "entries": []}, {"pg_config": {}, "entries": [entry] * 300}):
        with pytest.raises(ValueError, match="more ranks, sizes or types"):
            read_recording(pickle.dumps(dump, protocol=2))


@pytest.mark.parametrize("number", [float("inf"), 1e300, 1 << 63, -1, "9" * 5000])
def test_recording_refuses_numbers_that_no_recorder_writes(number: Any) -> None:
    with pytest.raises(ValueError, match=r"no recorder writes|integer string"):
        read_recording(pickle.dumps({"pg_config": {"0": {"ranks": [0, number]}}, "entries": []}, protocol=2))
