"""`bigbatch explain`: hangs whose culprit is known, played as torch's recorder writes them."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from played_flights import PlayedRank, play

from bigbatch.cli import main
from bigbatch.comm.rendezvous import hang_report


@dataclass
class Said:
    """What the command printed, and its exit code."""

    code: int
    lines: list[str]
    error: str

    @property
    def headline(self) -> str:
        return self.lines[0]


Explain = Callable[..., Said]


@pytest.fixture
def explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Explain:
    """Write dumps, and have them explained."""

    def run(ranks: Iterable[PlayedRank] = (), *options: str, form: str = "pickle") -> Said:
        for each in ranks:
            each.write(tmp_path, form=form)
        code = main(["explain", str(tmp_path), *options])
        out, err = capsys.readouterr()
        return Said(code, out.splitlines(), err)

    return run


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_rank_that_has_not_begun_is_named_with_the_collective(explain: Explain, form: str) -> None:
    ranks = play(4)
    for each in ranks:
        each.call(times=6).call("broadcast", size=7, line=33)
    for each in (ranks[0], ranks[1], ranks[3]):
        each.call("all_reduce", "started", size=2048)
    said = explain(ranks, form=form)
    assert said.headline == (
        "rank 2 has not begun collective 8 (nccl:all_reduce [2048] Float) of process group 0 (default_pg, 4 ranks), "
        "in which 3 others wait"
    )
    assert said.code == 1
    where = ", called at /job/train.py:33 step" if form == "pickle" else ""
    last = "collective 7 (nccl:broadcast [7] Float) of process group 0 (default_pg, 4 ranks)"
    assert said.lines[1] == f"  rank 2: the last that it began, and ended, is {last}{where}"
    assert [line.split()[:4] for line in said.lines[-2:]] == [["0-1,", "3", "0", "8"], ["2", "0", "7", "7"]]


@pytest.mark.parametrize("version", ["2.0", "2.10"])
def test_of_several_ranks_behind_the_furthest_is_named(explain: Explain, version: str) -> None:
    ranks = play(8, version=version)
    for rank, count in enumerate([9, 9, 9, 5, 7, 9, 9, 9]):
        ranks[rank].call(times=count)
    for rank in (0, 1, 2, 5, 6, 7):
        ranks[rank].call(state="scheduled", times=3)  # without TORCH_NCCL_ENABLE_TIMING no start is seen
    if version == "2.0":
        for entry in (entry for each in ranks for entry in each.entries):
            entry["seq_id"] = entry.pop("collective_seq_id")
            del entry["is_p2p"], entry["p2p_seq_id"], entry["input_dtypes"], entry["output_dtypes"]
    assert explain(ranks).headline.startswith("rank 3 has not begun collective 10 (nccl:all_reduce [1024]")


def test_several_ranks_equally_behind_are_all_named(explain: Explain) -> None:
    ranks = play(64, calls=3)
    for each in ranks:
        if each.rank not in (5, 40):
            each.call(state="started")
    assert explain(ranks).headline.startswith("rank 5 and rank 40 have not begun collective 4")
    for each in ranks[8:32]:
        del each.entries[3:]
    assert explain(ranks).headline.startswith("26 ranks (5, 8-31, 40) have not begun collective 4")


@pytest.mark.parametrize(
    ("name", "size", "dtype", "does"),
    [
        ("broadcast", 1024, "Float", "nccl:broadcast [1024] Float"),
        ("all_reduce", 1000, "Float", "nccl:all_reduce [1000] Float"),
        ("all_reduce", 1024, "Half", "nccl:all_reduce [1024] Half"),
    ],
)
def test_rank_that_calls_another_collective_is_named(
    explain: Explain, name: str, size: int, dtype: str, does: str
) -> None:
    ranks = play(4, calls=2)
    for each in ranks:
        if each.rank == 1:
            each.call(name, "started", size=size, dtype=dtype)
        else:
            each.call(state="started")
    assert explain(ranks).headline.startswith(f"rank 1 calls {does} as number 3 of process group 0 (")


def test_first_mismatch_is_named_where_it_ended_and_a_later_collective_hangs(explain: Explain) -> None:
    ranks = play(3)
    for each in ranks:
        each.call(times=2).call("broadcast" if each.rank == 2 else "all_reduce").call(state="started")
    assert explain(ranks).headline.startswith("rank 2 calls nccl:broadcast [1024] Float as number 3")


@pytest.mark.parametrize("is_over", [True, False])
def test_of_two_ranks_that_differ_groups_of_the_same_kind_say_who_is_wrong(explain: Explain, is_over: bool) -> None:
    """Tensor-parallel pairs; one rank of a pair skips its part."""
    ranks = play(6, {"1": [0, 1], "2": [2, 3], "3": [4, 5]})
    for each in ranks:
        each.descriptions |= dict.fromkeys("123", "mesh_tp")
        group = str(each.rank // 2 + 1)
        each.call(group=group).call("reduce" if each.rank == 3 else "all_gather", group=group, size=64)
        each.call(state="completed" if is_over else "started", group=group if is_over else "0")
    assert explain(ranks).headline.startswith("rank 3 calls nccl:reduce [64] Float as number 2 of process group 2 (")


@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter"])
def test_sizes_that_differ_by_right_are_no_mismatch(explain: Explain, name: str) -> None:
    ranks = play(3)
    for each in ranks:
        each.call(name)
        key = "input_sizes" if name == "scatter" else "output_sizes"
        each.entries[0][key] = [[10 + each.rank]]
    assert explain(ranks).code == 0


@pytest.mark.parametrize("state", ["started", "scheduled"])
def test_all_have_begun_and_none_completes(explain: Explain, state: str) -> None:
    ranks = play(4)
    for each in ranks:
        each.call(times=5).call(state=state, times=2)
    said = explain(ranks)
    verb = "started" if state == "started" else "begun"
    assert said.headline.startswith(f"no rank is behind: all 4 ranks have {verb} collective 6 (nccl:all_reduce [1024]")
    assert said.code == 1


def test_gpu_that_has_not_started_a_collective_is_named(explain: Explain) -> None:
    ranks = play(4)
    for each in ranks:
        each.call(times=5).call(state="scheduled" if each.rank == 3 else "started")
        if each.rank == 3:
            each.call(state="scheduled")  # its thread runs ahead, and its GPU is behind
    assert explain(ranks).headline.startswith("rank 3 has queued collective 6 (nccl:all_reduce [1024] Float)")


def test_message_without_its_counterpart_names_the_peer(explain: Explain) -> None:
    ranks = play(3, calls=1)
    ranks[0].message("send", 1).message("send", 1, "started")
    ranks[1].message("recv", 0)
    said = explain(ranks)
    assert said.headline.startswith("rank 1 has not posted the counterpart of message 2 (nccl:send 0->1 [8] Float)")
    assert "rank 1: the last that it began, and ended, is message 1" in said.lines[1]


def test_batch_of_messages_names_the_peer_at_the_end_of_the_chain(explain: Explain) -> None:
    """A pipeline of groups: numbers in the titles are those of the group, here of ranks 2 to 5."""
    ranks = play(6, {"7": [2, 3, 4, 5]})
    for each in ranks[2:]:
        each.call(group="7")
    for _ in range(3):
        ranks[2].batch(("send", 3), group="7")
        ranks[3].batch(("recv", 2), ("send", 4), group="7")
        ranks[4].batch(("recv", 3), ("send", 5), group="7")
        ranks[5].batch(("recv", 4), group="7")
    ranks[2].batch(("send", 3), state="started", group="7")
    ranks[3].batch(("recv", 2), ("send", 4), state="started", group="7")
    ranks[4].batch(("recv", 3), ("send", 5), state="started", group="7")
    said = explain(ranks)
    assert said.headline.startswith("rank 5 has not posted the counterpart of message 4 (nccl:coalesced of nccl:recv")
    assert "(of_7, 4 ranks)" in said.headline


def test_rank_without_a_dump_is_named_first(explain: Explain) -> None:
    ranks = play(4)
    for each in ranks:
        each.call(times=5).call(state="started")
    said = explain(each for each in ranks if each.rank != 2)
    assert said.headline.startswith("rank 2 left no dump")
    assert "3 others wait in collective 6 (nccl:all_reduce [1024] Float)" in said.headline
    assert not any(line.startswith("no rank is behind") for line in said.lines)


def test_nothing_is_wrong(explain: Explain) -> None:
    ranks = play(3, {"1": [0, 2]})
    for each in ranks:
        each.call(times=5).coalesced(3, 4, 5)
        if each.rank != 1:
            each.call("all_gather", group="1")
    ranks[0].batch(("send", 1), ("recv", 1))
    ranks[1].batch(("recv", 0), ("send", 0))
    said = explain(ranks)
    assert said.headline.startswith("nothing is wrong: all 3 ranks")
    assert said.code == 0
    assert explain([], "--json").code == 0


def test_late_rank_without_waiting_ranks_is_named(explain: Explain) -> None:
    ranks = play(3)
    for each in ranks:
        each.call(times=4 if each.rank == 1 else 6)
    said = explain(ranks)
    assert said.headline.startswith("rank 1 has begun fewer collectives than others, and no rank waits")
    assert "collective 5 (" in said.headline
    assert said.code == 1


@pytest.mark.parametrize("is_member", [True, False])
def test_chain_over_groups_ends_at_its_last_rank(explain: Explain, is_member: bool) -> None:
    """Rank 2 is late in the group of all since it waits for rank 5 in another, which waits for no rank."""
    ranks = play(6, {"1": [2, 5], "2": [0, 1, 2, 3]})
    of_all = "0" if is_member else "2"
    for each in ranks:
        each.call(times=5)
    for rank in (0, 1, 3, 4) if is_member else (0, 1, 3):
        ranks[rank].call("all_gather", "started", group=of_all)
    ranks[2].call("reduce_scatter", "started", group="1")
    said = explain(ranks)
    assert said.headline.startswith("rank 5 has not begun collective 1 (nccl:reduce_scatter [1024] Float)")
    assert not any("rank 2 has" in line for line in said.lines)


def test_of_two_groups_that_wait_for_a_rank_that_comes_first_which_one_waits_in_first(explain: Explain) -> None:
    """Rank 2 has queued both, that of the small group before that of all."""
    ranks = play(6, {"1": [2, 5]}, calls=3)
    for each in ranks:
        if each.rank == 2:
            each.call(state="started", group="1")
        if each.rank != 5:
            each.call(state="scheduled" if each.rank == 2 else "started")
    assert explain(ranks).headline.startswith("rank 5 has not begun collective 1 (nccl:all_reduce [1024] Float)")


def test_gpu_late_for_a_rank_behind_in_another_group(explain: Explain) -> None:
    """All have queued the collective of all; rank 2's GPU is still in one of its other group, for rank 5."""
    ranks = play(6, {"1": [2, 4, 5], "2": [0, 1, 2, 3]}, calls=3)
    for each in ranks:
        if each.rank in (2, 4):
            each.call(state="started", group="1")
        if each.rank < 4:
            each.call(state="scheduled" if each.rank == 2 else "started", group="2")
    assert explain(ranks).headline.startswith("rank 5 has not begun collective 1 (nccl:all_reduce [1024] Float)")


def test_messages_of_two_ranks(explain: Explain) -> None:
    """Received by the peer; posted by both; sent by both before they receive; of other sizes."""
    ranks = play(2)
    ranks[0].message("send", 1, "started")
    ranks[1].message("recv", 0)
    assert explain(ranks).headline.endswith("(default_pg, 2 ranks), which its peer has completed")
    ranks = play(2)
    ranks[0].batch(("send", 1), ("recv", 1), state="started")
    ranks[1].batch(("recv", 0), ("send", 0), state="started")
    assert explain(ranks).headline.startswith("no rank is behind: both ranks have started message 1 (nccl:coalesced")
    ranks = play(2)
    for each in ranks:
        each.message("send", 1 - each.rank, "started")
    assert explain(ranks).headline.startswith("rank 0 and rank 1 wait for each other: rank 0 in message 1")
    ranks = play(2)
    ranks[0].message("send", 1, "started", size=8)
    ranks[1].message("recv", 0, "started", size=9)
    assert explain(ranks).headline.startswith("rank 0 and rank 1 disagree on the size or type of message 1")


def test_group_whose_ranks_are_not_told_has_those_that_used_it(explain: Explain) -> None:
    """In gloo's dumps operations have no state, and are retired as they end."""
    ranks = play(4, {"1": [0, 1]}, calls=3)
    for each in ranks:
        if each.rank < 2:
            each.call(group="1", times=2 - each.rank)
        each.groups = {**each.groups, "0": [], "1": []}
        for entry in each.entries:
            entry["profiling_name"] = "gloo:all_reduce"
            entry["state"] = "scheduled"
    ranks[0].entries[-1]["retired"] = False
    assert explain(ranks).headline.startswith("rank 1 has not begun collective 2 (gloo:all_reduce [1024] Float) of")
    ranks[1].entries.pop()
    assert explain(ranks).headline.endswith("(of_1, 1 rank), and no other rank of its group is known")


def test_groups_that_are_queued_in_another_order_are_a_circle(explain: Explain) -> None:
    """All have begun all, as hosts run ahead of their GPUs, which do one after the other."""
    ranks = play(3, {"1": [0, 1], "2": [0, 1]}, calls=3)
    for each, order in zip(ranks, ("12", "21"), strict=False):
        for group in order:
            each.call(state="scheduled", group=group)
    for each in ranks:
        each.call(state="scheduled")
    assert explain(ranks).headline == (
        "rank 0 and rank 1 wait for each other: rank 0 in collective 1 (nccl:all_reduce [1024] Float) of group 1; "
        "rank 1 in collective 1 (nccl:all_reduce [1024] Float) of group 2"
    )


def test_circle_is_shown_if_a_rank_has_not_begun(explain: Explain) -> None:
    """Rank 2 has left out its part of a pair, and waits in messages around a ring, as all others do."""
    ranks = play(4, {"1": [0, 1], "2": [2, 3]}, calls=3)
    for each in ranks:
        if each.rank != 2:
            each.call("reduce", "scheduled" if each.rank == 3 else "completed", group=str(each.rank // 2 + 1))
        each.batch(("send", (each.rank + 1) % 4), ("recv", (each.rank - 1) % 4), state="scheduled")
    said = explain(ranks)
    assert said.headline.startswith("rank 2 and rank 3 wait for each other: rank 2 in message 1 (nccl:coalesced of")
    assert said.headline.endswith("rank 3 in collective 1 (nccl:reduce [1024] Float) of group 2")


def test_rank_that_waits_first_for_another_is_followed(explain: Explain) -> None:
    """Both of a pair have queued its collective; one of them waits for rank 2 in what it has queued before."""
    ranks = play(3, {"1": [0, 1], "2": [0, 2]}, calls=3)
    ranks[0].call("broadcast", "scheduled", group="2").call("all_gather", "scheduled", group="1")
    ranks[1].call("all_gather", "scheduled", group="1")
    said = explain(ranks)
    assert said.headline.startswith("rank 2 has not begun collective 1 (nccl:broadcast [1024] Float)")
    assert not any("no rank is behind" in line for line in said.lines)


def test_gpu_that_has_not_started_a_message_is_named(explain: Explain) -> None:
    ranks = play(4, calls=1)
    ranks[0].message("send", 1, "started")
    ranks[1].message("recv", 0, "scheduled")
    what = "message 1 (nccl:{} [8] Float) of process group 0 (default_pg, 4 ranks)"
    lacks = ", and the GPU has not started it, but the peer's GPU has"
    assert explain(ranks).headline == f"rank 1 has queued {what.format('recv 1<-0')}{lacks}"
    ranks[1].call(state="scheduled", group="0")  # which waits for the message
    assert explain(ranks).headline == f"rank 1 has queued {what.format('recv 1<-0')}{lacks}"


def test_peer_whose_gpu_has_something_else_first_is_followed(explain: Explain) -> None:
    """Rank 1 has posted its side behind a collective that hangs."""
    ranks = play(3, {"1": [1, 2]})
    ranks[1].call("reduce", "scheduled", group="1")
    ranks[2].call("reduce", "scheduled", group="1")
    ranks[0].message("send", 1, "started")
    ranks[1].message("recv", 0, "scheduled")
    assert explain(ranks).headline.startswith("no rank is behind: both ranks have begun collective 1 (nccl:reduce")


def test_ring_that_ran_over(explain: Explain) -> None:
    """Ranks remember different stretches; one has only what is pending, one nothing of the group."""
    ranks = play(4, {"1": [1, 3]})
    for each in ranks:
        each.call("broadcast", times=each.rank + 1).call(times=40 - each.rank)
    for each in ranks[:3]:
        each.call(state="started")
    ranks[3].call(group="1", times=50)
    ranks[1].call(group="1", times=50)
    for each, count in zip(ranks, (41, 10, 30, 41), strict=True):
        each.forget(count)
    assert explain(ranks).headline.startswith("rank 3 has not begun collective 42 (nccl:all_reduce [1024] Float)")


@pytest.mark.parametrize("forgets", [False, True])
def test_rank_still_in_what_others_completed_is_named(explain: Explain, forgets: bool) -> None:
    """Also where the others' recorders have overwritten it."""
    ranks = play(4)
    for each in ranks:
        each.call(times=6).call(state="started" if each.rank == 2 else "completed")
        if each.rank != 2 and forgets:
            each.call(times=3).forget(8)
        elif each.rank != 2:
            each.call(state="started")
    said = explain(ranks)
    assert said.headline.startswith("rank 2 is still in collective 7 (nccl:all_reduce [1024] Float)")
    assert said.headline.endswith("which 3 others have completed")


def test_nothing_wrong_in_what_recorders_keep_is_said_so(explain: Explain) -> None:
    ranks = play(2, calls=6)
    ranks[1].forget(2)
    assert explain(ranks).headline.endswith(
        "the same, of what is kept: rank 1 began more than a recorder holds (TORCH_FR_BUFFER_SIZE)"
    )


def test_uneven_gather_within_a_coalesced_collective(explain: Explain) -> None:
    ranks = play(3)
    for each in ranks:
        each.call().coalesced(3, 4 + (each.rank == 1), 5, state="started")
    assert explain(ranks).headline.startswith("rank 1 calls nccl:ALLGATHER_coalesced as number 2 of process group 0")


def test_groups_of_one_name_are_told_apart_by_their_ranks(explain: Explain) -> None:
    """torch's split_group gives them so."""
    ranks = play(4)
    for each in ranks:
        each.groups = {**each.groups, "1": [0, 1] if each.rank < 2 else [2, 3]}
        each.call(group="1", times=2)
        if each.rank != 3:
            each.call(state="started" if each.rank == 2 else "completed", group="1")
    assert explain(ranks).headline.startswith("rank 3 has not begun collective 3")


def test_json_for_machines(explain: Explain) -> None:
    ranks = play(3, calls=2)
    for each in ranks[1:]:
        each.call(state="started")
    said = explain(ranks, "--json")
    told = json.loads(said.lines[0])
    assert (said.code, told["culprits"], told["findings"][0]["kind"]) == (1, [0], "has not begun")
    assert told["findings"][0]["group"]["ranks"] == [0, 1, 2]
    assert told["findings"][0]["operation"]["number"] == 3
    assert told["ranks"]["0"]["groups"] == {"0": {"last_begun": 2, "last_ended": 2}}
    assert told["ranks"]["1"]["waits"] is True


def test_our_own_dumps_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, explain: Explain) -> None:
    """Beside torch's own by the name that it was given, else in files for temporary ones."""
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hang_report.tempfile, "tempdir", str(tmp_path))
    ranks = play(3)
    for each in ranks:
        each.call(state="completed" if each.rank == 1 else "started", times=1)
    ranks[0].call(state="scheduled")
    for each in ranks:
        hang_report.keep_flight(each.write(tmp_path, form="json").read_text(), rank=each.rank)
        (tmp_path / f"nccl_trace_rank_{each.rank}.json").unlink()
    assert explain().headline.startswith("rank 0 and rank 2 are still in collective 1")
    for path in tmp_path.iterdir():
        path.unlink()
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/nccl_trace_rank_")
    for each in ranks:
        hang_report.keep_flight("{}", rank=each.rank)
        hang_report.keep_flight(each.write(tmp_path, form="json").read_text(), rank=each.rank)
    said = explain(ranks)
    assert said.headline.startswith("rank 0 and rank 2 are still in collective 1")
    assert "train.py" in said.lines[1], "torch's own, which says where"


WITHOUT_RANK_1 = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
group = dist.new_group([0, 1], group_desc="pair")
dist.all_reduce(torch.ones(4), group=group)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if rank == 0:
    dist.all_reduce(torch.ones(7), async_op=True)
while sum(entry["retired"] for entry in json.loads(c10d._dump_fr_trace_json())["entries"]) < 4:
    time.sleep(0.05)  # what is over is recorded some time after
(folder / f"trace_rank_{rank}").write_bytes(c10d._dump_fr_trace())
(folder / "json").mkdir(exist_ok=True)
(folder / "json" / f"trace_rank_{rank}.json").write_bytes(c10d._dump_fr_trace_json())
while rank == 1 and not (folder / "rank_0_is_done").exists():
    time.sleep(0.05)  # as one end closes, the other's collective fails
(folder / f"rank_{rank}_is_done").touch()
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(hang_report._distributed_c10d, "_dump_fr_trace"), reason="this torch records NCCL only")
def test_real_recordings_are_explained(tmp_path: Path, explain: Explain, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    command = [sys.executable, "-c", WITHOUT_RANK_1]
    other = subprocess.Popen([*command, "1", str(tmp_path)], env=environ)
    subprocess.run([*command, "0", str(tmp_path)], env=environ, check=True, timeout=100)
    assert other.wait(timeout=100) == 0
    named = "rank 1 has not begun collective 4 (gloo:all_reduce [7] Float) of process group 0 (default_pg, 2 ranks)"
    said = explain()
    assert said.headline.startswith(named)
    assert "<string>:" in said.lines[1]
    assert main(["explain", str(tmp_path / "json")]) == 1
    assert capsys.readouterr().out.startswith(named)


class Hostile:
    """Unpickled, it would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 5])
def test_hostile_pickle_is_refused(explain: Explain, tmp_path: Path, protocol: int) -> None:
    play(2)[0].call().write(tmp_path)
    victim = tmp_path / "victim"
    path = tmp_path / "nccl_trace_rank_1"
    path.write_bytes(pickle.dumps({"entries": [Hostile(victim)], "pg_config": {}}, protocol=protocol))
    said = explain()
    assert (said.code, said.lines) == (2, [])
    assert said.error == (
        f"bigbatch: {path}: no dump of torch's flight recorder: reading it would run code, and only data is expected\n"
    )
    assert not victim.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02Nr\xff\xff\xff\x0f.",  # memory by the number under which it is remembered
        b"\x80\x02(((((.",
        b"[" * 100_000,
        b"{}",
        b'{"entries": [{"process_group": ["0", ""]}]}',
        b'{"entries": [], "pg_config": {"0": {"ranks": "[0, "}}}',
        pickle.dumps({"entries": [], "pg_config": {}}, protocol=2)[:-4],
    ],
)
def test_what_is_no_dump_is_refused_by_one_line(explain: Explain, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "trace_rank_0"
    path.write_bytes(data)
    said = explain()
    assert (said.code, said.lines) == (2, [])
    assert said.error.startswith(f"bigbatch: {path}: no dump of torch's flight recorder: ")
    assert said.error.count("\n") == 1


def test_recorders_that_were_off(explain: Explain) -> None:
    said = explain(play(2), form="json")
    assert said.code == 2
    assert said.error.endswith("the dumps hold no operations; start the job with TORCH_FR_BUFFER_SIZE=2000\n")


def test_dump_that_was_cut_off_counts_as_none(explain: Explain, tmp_path: Path) -> None:
    ranks = play(3)
    for each in ranks:
        each.call(times=3).call(state="started").write(tmp_path)
    path = tmp_path / "nccl_trace_rank_1"
    path.write_bytes(path.read_bytes()[:100])
    said = explain()
    assert said.headline.startswith("rank 1 left no dump")
    assert said.error == f"bigbatch: not read: {path}: no dump of torch's flight recorder: it is cut off\n"


def test_dumps_are_found_by_name(explain: Explain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain().error.startswith(f"bigbatch: {tmp_path}: no dumps")
    for name in ("none_3", "none"):
        assert main(["explain", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.endswith(f"{name}: No such file or directory\n")
    (tmp_path / "notes.txt").write_text("3")
    assert main(["explain", str(tmp_path / "notes.txt")]) == 2
    assert "does not end in a rank" in capsys.readouterr().err
    os.mkfifo(tmp_path / "fr_dump_pipe_7")
    ranks = play(2)
    for each in ranks:
        each.call().write(tmp_path)
    said = explain()
    assert (said.code, said.error.count("\n")) == (0, 1)
    assert "fr_dump_pipe_7" in said.error
    (tmp_path / "other_rank_0").write_bytes(ranks[0].write(tmp_path).read_bytes())
    assert "rank 0 has several dumps" in explain().error
    paths = [str(tmp_path / f"nccl_trace_rank_{rank}") for rank in range(2)]
    assert main(["explain", *paths]) == 0
