"""One job at a time writes into a run folder: which is refused, which takes over, and never two own it."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from error_texts import naming
from owned_folder import owning

from bigbatch.comm.rendezvous.environ import STOPPED_VARIABLE
from bigbatch.errors import RunFolderError
from bigbatch.trainer.folder import owner as module
from bigbatch.trainer.folder.owner import Claim, has_failed, newest_claim, own_claim, take, take_over

HERE = own_claim()
ELSEWHERE = replace(HERE, user="ann", host="n7", pid=4711, kernel="another boot", born="1")


class Clock:
    """A clock that advances only in sleep(), and events at stated times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.events: list[Callable[[float], object]] = []
        # the module's name alone: a thread of another test may sleep meanwhile
        played = {**vars(time), "monotonic": lambda: self.now, "sleep": self.sleep}
        monkeypatch.setattr(module, "time", SimpleNamespace(**played))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for event in self.events:
            event(self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def lay(folder: Path, claim: Claim, *, number: int = 1) -> Path:
    """The file of an owner without heartbeats."""
    path = folder / f".owner-{number}"
    path.write_bytes(replace(claim, folder=folder.stat().st_ino).text())
    return path


def beating(path: Path, *, until: float = float("inf")) -> Callable[[float], None]:
    """What the owner of a file does while time passes; the file system's clock is not ours."""

    def beat(now: float) -> None:
        if now < until:
            os.utime(path, (7 * now, 7 * now))

    return beat


def dead_here() -> Claim:
    """The claim of a process that has ended without a word."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writing, own_claim().text())
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    os.close(writing)
    with os.fdopen(reading) as said:
        return Claim(**module.json.loads(said.read()))


def may_take(folder: Path, claim: Claim = HERE) -> None:
    take(folder, claim).release()


def test_folder_without_owner_is_taken(clock: Clock, tmp_path: Path) -> None:
    for _ in range(3):
        may_take(tmp_path / "new" / "run")
    assert clock.now == 100
    assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == [".owner-3"]


def test_owner_that_lives_here_is_named_to_the_second_job(clock: Clock, tmp_path: Path) -> None:
    with owning(tmp_path):
        named = (tmp_path, f"process {os.getpid()} of {HERE.user} on {HERE.host}", "run.directory")
        with pytest.raises(RunFolderError, match=naming(*named)):
            take(tmp_path, HERE)
    assert clock.now < 112
    may_take(tmp_path)


def test_owner_that_is_dead_here_is_replaced_at_once(clock: Clock, tmp_path: Path) -> None:
    lay(tmp_path, dead_here())
    may_take(tmp_path)
    lay(tmp_path, replace(HERE, born="1"), number=3)  # another process has its number now
    may_take(tmp_path)
    assert clock.now == 100


def test_owner_that_dies_while_it_is_waited_for_is_replaced(clock: Clock, tmp_path: Path) -> None:
    """The owner is the first rank of a job that has lost another one, and records that before it ends."""
    held = take(tmp_path, HERE)
    clock.events.append(lambda now: held.release() if now > 105 else None)
    may_take(tmp_path)
    assert 105 < clock.now < 107


def test_owner_has_failed_where_it_says_so_or_its_kernel_knows(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One elsewhere that says nothing may have storage that stands still: its job is not to be ended for that."""
    monkeypatch.setenv(STOPPED_VARIABLE, "mine")
    assert not has_failed(tmp_path / "none", launch_id="mine")
    with owning(tmp_path):
        assert not has_failed(tmp_path, launch_id="mine")
    assert not has_failed(tmp_path, launch_id="mine"), "it ended well"
    with suppress(ZeroDivisionError), owning(tmp_path):
        raise ZeroDivisionError
    assert has_failed(tmp_path, launch_id="mine")
    assert not has_failed(tmp_path, launch_id="another's")
    lay(tmp_path, replace(ELSEWHERE, launch_id="mine"), number=3)
    clock.now += 3600
    assert not has_failed(tmp_path, launch_id="mine")
    lay(tmp_path, dead_here(), number=4)
    assert has_failed(tmp_path, launch_id="mine")


def test_owner_of_a_folder_does_not_own_its_copy(clock: Clock, tmp_path: Path) -> None:
    with owning(tmp_path / "a"):
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        may_take(tmp_path / "b")
    assert clock.now == 100


def test_owner_elsewhere_that_beats_is_refused_to_others(clock: Clock, tmp_path: Path) -> None:
    clock.events.append(beating(lay(tmp_path, replace(ELSEWHERE, job="12 of big"))))
    named = naming(tmp_path, "Slurm job 12 of big, process 4711 of ann on n7", "bigbatch launch cancel 12)")
    with pytest.raises(RunFolderError, match=named):
        take(tmp_path, HERE)
    assert clock.now < 112


@pytest.mark.parametrize("last_beat", [0.0, 104.0, 109.0])
def test_owner_elsewhere_that_misses_its_beats_is_replaced(last_beat: float, clock: Clock, tmp_path: Path) -> None:
    """It is not a reason to refuse that it still beat after we had come, as a job that crashed just now did."""
    clock.events.append(beating(lay(tmp_path, ELSEWHERE), until=last_beat))
    if last_beat > 105:
        with pytest.raises(RunFolderError):
            take(tmp_path, HERE)
        return
    may_take(tmp_path)
    assert max(last_beat, 100) + 29 <= clock.now <= max(last_beat, 100) + 31


def test_owner_whose_file_is_no_claim_is_judged_by_its_beats(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / ".owner-1"
    path.write_bytes(b"{")
    clock.events.append(beating(path))
    with pytest.raises(RunFolderError, match=naming(tmp_path, "another job")):
        take(tmp_path, HERE)
    clock.events.clear()
    path.unlink()
    os.mkfifo(path)  # no process writes to it; the reader must not wait for ever
    before = clock.now
    may_take(tmp_path)
    assert clock.now >= before + 30


def test_owner_of_the_same_slurm_job_is_replaced_by_its_restart_alone(clock: Clock, tmp_path: Path) -> None:
    first = replace(ELSEWHERE, job="12 of big")
    path = lay(tmp_path, first)
    clock.events.append(beating(path))
    for second in (replace(HERE, job="12 of big"), replace(HERE, job="13 of big", restart=1)):
        with pytest.raises(RunFolderError):
            take(tmp_path, second)
    before = clock.now
    may_take(tmp_path, replace(HERE, job="12 of big", restart=1))
    assert clock.now == before


def test_owner_that_was_replaced_while_it_stood_still_writes_no_more(clock: Clock, tmp_path: Path) -> None:
    first = take(tmp_path, HERE)
    first.require_ownership()
    lay(tmp_path, ELSEWHERE, number=2)
    with pytest.raises(RunFolderError, match=naming(tmp_path, "process 4711 of ann on n7", "writes nothing more")):
        first.require_ownership()
    (tmp_path / ".owner-1").unlink()  # as the second one does
    first.release()
    assert [path.name for path in tmp_path.iterdir()] == [".owner-2"]


def test_owner_that_lives_is_succeeded_once(clock: Clock, tmp_path: Path) -> None:
    """Only the first rank of the continuing group succeeds it, not that of another group that believes to be alone."""
    first = take(tmp_path, HERE)
    second = take_over(tmp_path, number=first.number, store=("n1", 4711))
    assert newest_claim(tmp_path) == replace(own_claim(store=("n1", 4711)), folder=tmp_path.stat().st_ino)
    second.require_ownership()
    with pytest.raises(RunFolderError, match="now belongs to"):
        first.require_ownership()
    with pytest.raises(RunFolderError, match=naming(tmp_path, "another owner", "no disk that all nodes share")):
        take_over(tmp_path, number=first.number)
    first.release()
    second.release()
    assert [path.name for path in tmp_path.iterdir()] == [".owner-2"]


def test_lost_owner_is_succeeded_only_if_it_has_ended_and_told_no_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that wakes after its successor has finished the run must not train again."""
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    here = own_claim()
    first, lost = take(tmp_path, here), [(here.kernel, here.pid, here.born)]
    second = take_over(tmp_path, number=first.number)
    with pytest.raises(RunFolderError, match="another owner"):
        take_over(tmp_path, number=first.number, lost=[("another", 1, "1")])
    with pytest.raises(RunFolderError, match="which runs"):
        take_over(tmp_path, number=first.number, lost=lost)
    monkeypatch.setattr(module, "_is_alive", lambda owner, claim: False)
    third = take_over(tmp_path, number=first.number, lost=lost)
    assert third.number == 3
    with pytest.raises(RunFolderError, match="now belongs to"):
        second.confirm()
    third.confirm()
    with pytest.raises(RunFolderError, match="another owner"):
        take_over(tmp_path, number=first.number, lost=lost)
    for each in (first, second, third):
        each.release()
    with pytest.raises(RunFolderError, match="another owner"):
        take_over(tmp_path, number=first.number, lost=lost)


def test_owner_lives_by_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    with owning(tmp_path):
        path = tmp_path / ".owner-1"
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 60
        while module._beat_of(path) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_owner_is_one_of_many_that_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    lay(tmp_path, dead_here(), number=5)
    start = threading.Barrier(8)

    def run(_: int) -> module.Owner | None:
        start.wait()
        try:
            return take(tmp_path, HERE)
        except RunFolderError:
            return None

    with ThreadPoolExecutor(8) as pool:
        owners = [owner for owner in pool.map(run, range(8)) if owner]
    assert len(owners) == 1
    owners[0].require_ownership()
    owners[0].release()


def test_owner_that_looked_long_ago_does_not_own_a_number_that_others_had(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw 1 gone; meanwhile 2 came and went, and 3 came, and removed the files before its own."""
    old = lay(tmp_path, dead_here())

    def create_late(path: Path, text: bytes) -> bool:
        monkeypatch.setattr(module, "_create", create)
        old.unlink()
        clock.events.append(beating(lay(tmp_path, ELSEWHERE, number=3)))
        return create(path, text)

    create = module._create
    monkeypatch.setattr(module, "_create", create_late)
    with pytest.raises(RunFolderError, match=naming("process 4711 of ann on n7")):
        take(tmp_path, HERE)
    assert [path.name for path in tmp_path.iterdir()] == [".owner-3"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_owner_is_known_where_there_are_no_hard_links(
    code: int, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuses)
    with owning(tmp_path):
        assert not module._create(tmp_path / ".owner-1", b"")
        with pytest.raises(RunFolderError, match=naming(f"process {os.getpid()}")):
            take(tmp_path, HERE)


def test_claim_that_finds_no_space_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each start of a job on a full disk would leave one more file."""

    def fails(path: Path, data: bytes) -> int:
        path.write_bytes(b"")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_new", fails)
    with pytest.raises(RunFolderError, match="No space left on device"):
        take(tmp_path, HERE)
    assert not any(tmp_path.iterdir())


def test_owner_whose_link_was_made_and_whose_answer_was_lost_owns(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS the client repeats such a request."""

    def link_twice(one: Path, other: Path) -> None:
        link(one, other)
        link(one, other)

    link = os.link
    monkeypatch.setattr(os, "link", link_twice)
    may_take(tmp_path)
    assert clock.now == 100


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EXDEV])
def test_owner_whose_claim_cannot_be_made_says_so_and_leaves_nothing(
    code: int, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        assert clock.now < 1000, "tried for ever"
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", fails)
    with pytest.raises(RunFolderError, match=naming("cannot write", tmp_path, os.strerror(code))):
        take(tmp_path, HERE)
    assert not list(tmp_path.iterdir())
