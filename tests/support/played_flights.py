"""Dumps of torch's flight recorder as NCCL runs leave them, played: in the words and numbers of ProcessGroupNCCL."""

import json
import pickle
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

LIBRARY = {"name": "all_reduce", "filename": "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", "line": 9}


class PlayedRank:
    """One rank's recorder: counts as torch does, collectives by group, messages by rank and group, records at all."""

    def __init__(self, rank: int, groups: dict[str, list[int]], *, version: str = "2.10") -> None:
        self.rank, self.groups, self.version = rank, groups, version
        self.descriptions: dict[str, str] = {}
        self.entries: list[Entry] = []
        self.counts: dict[tuple[str, bool], int] = {}

    def call(
        self,
        name: str = "all_reduce",
        state: str = "completed",
        *,
        size: int = 1024,
        dtype: str = "Float",
        group: str = "0",
        line: int = 12,
        times: int = 1,
    ) -> "PlayedRank":
        """Begin collectives, one after the other."""
        for _ in range(times):
            self._record(f"nccl:{name}", state, self._next(group, False), False, [[size]], dtype, group, line)
        return self

    def message(
        self, what: str, peer: int, state: str = "completed", *, size: int = 8, group: str = "0"
    ) -> "PlayedRank":
        """Begin a send or recv by itself; peer is a rank of the job."""
        self._record(self._title(what, peer, group), state, self._next(group, True), True, [[size]], "Float", group, 20)
        return self

    def batch(self, *parts: tuple[str, int], state: str = "completed", group: str = "0") -> "PlayedRank":
        """Begin messages (what, peer) as batch_isend_irecv does: their own entries stay scheduled for good."""
        number = self._next(group, True)
        for what, peer in parts:
            self._record(self._title(what, peer, group), "scheduled", number, True, [[8]], "Float", group, 30)
        self._record("nccl:coalesced", state, number, True, [], "", group, 30)
        return self

    def coalesced(self, *sizes: int, state: str = "completed", name: str = "_broadcast_oop") -> "PlayedRank":
        """Begin collectives of one group as one, as an all-gather of uneven sizes does."""
        number = self._next("0", False)
        for size in sizes:
            self._record(f"nccl:{name}", "scheduled", number, False, [[size]], "Float", "0", 40)
        self._record("nccl:ALLGATHER_coalesced", state, number, False, [], "", "0", 40)
        return self

    def forget(self, count: int) -> "PlayedRank":
        """Let the ring run over: the oldest entries are gone."""
        del self.entries[:count]
        return self

    def dump(self) -> dict[str, Any]:
        """Return what the recorder writes."""
        groups = {
            name: {"name": name, "desc": self._describe(name), "ranks": str(ranks)}
            for name, ranks in self.groups.items()
            if self.rank in ranks or not ranks
        }
        status = {"last_enqueued_collective": 1, "last_started_collective": -1, "last_completed_collective": 1}
        told = {"version": self.version, "pg_config": groups, "pg_status": {"0": status}, "entries": self.entries}
        return {**told, "nccl_comm_state": {}}

    def write(self, folder: Path, *, form: str = "pickle") -> Path:
        """Write the dump as torch does, or as we do in JSON, which has no frames."""
        if form == "pickle":
            path = folder / f"nccl_trace_rank_{self.rank}"
            path.write_bytes(pickle.dumps(self.dump(), protocol=2))
            return path
        path = folder / f"nccl_trace_rank_{self.rank}.json"
        dump = self.dump()
        dump["entries"] = [{key: each[key] for key in each if key != "frames"} for each in dump["entries"]]
        if not dump["entries"]:
            del dump["entries"]
        path.write_text(json.dumps(dump))
        return path

    def _describe(self, group: str) -> str:
        return self.descriptions.get(group, "default_pg" if group == "0" else f"of_{group}")

    def _next(self, group: str, is_message: bool) -> int:
        self.counts[group, is_message] = self.counts.get((group, is_message), 0) + 1
        return self.counts[group, is_message]

    def _title(self, what: str, peer: int, group: str) -> str:
        me, other = (self.groups[group].index(rank) for rank in (self.rank, peer))
        return f"nccl:{what} {me}{'->' if what == 'send' else '<-'}{other}"

    def _record(
        self, title: str, state: str, number: int, is_message: bool, sizes: Any, dtype: str, group: str, line: int
    ) -> None:
        own = {"name": "step", "filename": "/job/train.py", "line": line}
        self.entries.append(
            {
                "frames": [LIBRARY, own],
                "record_id": len(self.entries),
                "pg_id": list(self.groups).index(group),
                "process_group": (group, self._describe(group)),
                "collective_seq_id": self.counts.get((group, False), 0) if is_message else number,
                "p2p_seq_id": number if is_message else self.counts.get((group, True), 0),
                "op_id": len(self.entries) + 1,
                "profiling_name": title,
                "time_created_ns": 1_700_000_000_000_000_000 + len(self.entries),
                "input_sizes": sizes,
                "input_dtypes": [dtype] * len(sizes),
                "output_sizes": sizes,
                "output_dtypes": [dtype] * len(sizes),
                "state": state,
                "time_discovered_started_ns": None if state == "scheduled" else 1,
                "time_discovered_completed_ns": 2 if state == "completed" else None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": is_message,
            }
        )


def play(
    num_ranks: int, groups: dict[str, list[int]] | None = None, *, calls: int = 0, version: str = "2.10"
) -> list[PlayedRank]:
    """Return the recorders of ranks in group 0, that of all, and others, after some collectives of all."""
    told = {"0": list(range(num_ranks)), **(groups or {})}
    return [PlayedRank(rank, told, version=version).call(times=calls) for rank in range(num_ranks)]
