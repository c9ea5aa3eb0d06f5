"""Recordings of torch's flight recorder from all ranks of a job, by group and number."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from bigbatch.comm.rendezvous.recording import MESSAGE, Operation, ProcessGroup, Recording


class RecordedJob:
    """The recordings of all ranks, by group."""

    def __init__(self, recordings: Mapping[int, Recording]) -> None:
        self.recordings = recordings
        grouped = {rank for each in recordings.values() for group in each.groups.values() for rank in group.ranks}
        self.ranks = sorted(grouped | recordings.keys())
        """All known ranks, with and without a dump."""
        self.waiting = {rank: each.waiting for rank, each in recordings.items() if each.waiting is not None}
        """Rank -> the first operation that it has not ended."""
        self._groups: dict[tuple[int, str], ProcessGroup] = self._complete_groups()
        self.begun: dict[ProcessGroup, dict[int, int]] = {}
        self.collectives: dict[ProcessGroup, dict[int, dict[int, Operation]]] = {}
        """Group -> number -> rank -> its operation."""
        self.messages: dict[tuple[int, ProcessGroup, str, int], list[tuple[Operation, Operation]]] = defaultdict(list)
        """(rank, group, send or recv, peer) -> its messages, each with its batch, or with itself if it has none."""
        for rank, recording in recordings.items():
            self._index(rank, recording)

    def group_of(self, rank: int, operation: Operation) -> ProcessGroup:
        return self._groups[rank, operation.group.name]

    def peers_of(self, rank: int, operation: Operation) -> list[tuple[Operation, int]]:
        """Return the messages of an operation, each with its peer."""
        group = self.group_of(rank, operation)
        found = []
        for part in operation.parts or (operation,):
            if match := MESSAGE.search(part.name):
                me, peer = int(match[2]), int(match[3])
                # numbers are those of the group
                if me < len(group.ranks) and peer < len(group.ranks) and group.ranks[me] == rank:
                    peer = group.ranks[peer]
                found.append((part, peer))
        return found

    def _complete_groups(self) -> dict[tuple[int, str], ProcessGroup]:
        """Return rank and name -> group; a group without ranks in the dump gets those that used it."""
        users = defaultdict(set)
        for rank, recording in self.recordings.items():
            for group in {each.group.name: each.group for each in recording.operations}.values():
                users[group.name, group.description].add(rank)
        known: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}  # several groups may have one name
        completed = {}
        for rank, recording in self.recordings.items():
            groups = {each.group.name: each.group for each in recording.operations}
            for name, group in {**recording.groups, **groups}.items():
                if not group.ranks:
                    is_all = group.description == "default_pg"
                    ranks = self.ranks if is_all else sorted(users[name, group.description])
                    group = replace(group, ranks=tuple(ranks))
                completed[rank, name] = known.setdefault((name, group.ranks), group)
        return completed

    def _index(self, rank: int, recording: Recording) -> None:
        for each in recording.operations:
            group = self.group_of(rank, each)
            if each.is_message:
                for part, peer in self.peers_of(rank, each):
                    self.messages[rank, group, part.kind, peer].append((part, each))
            else:
                self.begun.setdefault(group, {})[rank] = each.number
                self.collectives.setdefault(group, {}).setdefault(each.number, {})[rank] = each
