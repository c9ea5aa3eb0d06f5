"""A secret that rank 0 hands to the ranks of its host: no process of another user can read it, or give another one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from error_texts import naming
from forked_ranks import clean_environ, free_port
from other_users import MALLORY

from bigbatch.comm.rendezvous.handed_secret import hand_out, receive
from bigbatch.comm.rendezvous.secret import AuthenticationError

SESSION = "0123456789abcdef" * 2
OTHER = "f" * 32


def test_ranks_of_this_user_receive_the_secret_and_each_start_has_its_own() -> None:
    secret, place = hand_out(SESSION)
    again, elsewhere = hand_out(OTHER)
    assert len(secret) == 64
    assert secret != again
    code = (
        "import sys; from bigbatch.comm.rendezvous.handed_secret import receive; print(receive(*sys.argv[1:]).decode())"
    )
    shown = subprocess.run([sys.executable, "-c", code, SESSION, place], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == secret.decode()
    assert receive(OTHER, elsewhere) == again
    with pytest.raises(RuntimeError, match=naming("earlier start")):
        receive(OTHER, place)


def test_place_that_a_foreigner_could_have_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store is open to every process of the host, so its text names anything."""
    known = tmp_path / f"memfd:bigbatch-{SESSION} (deleted)"
    known.write_text("a" * 64)
    _, place = hand_out(SESSION)
    with known.open() as file:
        texts = ["", "/", f"../{place}", f"{place}/..", f"{place}\n", "self/fd/0", f"{os.getpid()}/fd/{file.fileno()}"]
        texts += [f"{os.getpid()}/fd/99999", "4194304999/fd/1", f"{os.getpid()}/exe"]
        for text in texts:
            with pytest.raises(RuntimeError):
                receive(SESSION, text)
    with pytest.raises(RuntimeError):
        receive("../../etc", place)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # as another user's rank 0 would look
    with pytest.raises(RuntimeError, match=naming("not of a process of this user")):
        receive(SESSION, place)


def test_memory_of_another_user_is_refused_in_a_process_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setuid program belongs to root, and inherits the memory that a user named before."""
    secret, place = hand_out(SESSION)
    assert receive(SESSION, place) == secret
    if os.geteuid() == 0:
        os.fchown(int(place.rpartition("/")[2]), MALLORY, -1)
    else:
        facts = os.stat_result([0o100777, 1, 1, 0, MALLORY, 0, 64, 0, 0, 0])
        monkeypatch.setattr(os, "fstat", lambda _: facts)
    with pytest.raises(AuthenticationError, match=naming("not of a process of this user")):
        receive(SESSION, place)


def _refuse(*_: object) -> int:
    raise PermissionError("by seccomp")


@pytest.mark.parametrize("lacking", ["memfd_create", "readlink"])
def test_host_without_such_memory_has_no_secret_but_no_other_process_can_claim_so(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AuthenticationError):
        receive(SESSION, "")  # this process could hand one out
    monkeypatch.setattr(os, lacking, _refuse)
    assert hand_out(SESSION) == (b"", "")
    assert receive(SESSION, "") == b""


def test_rank_that_does_not_see_rank_0_in_proc_says_so() -> None:
    with pytest.raises(AuthenticationError, match=naming("/proc", "rank 0")):
        receive(SESSION, "4194304999/fd/1")


@pytest.mark.long
def test_plain_torchrun_on_this_host_authenticates_and_says_nothing_of_secrets(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import bigbatch, torch\n"
        "with bigbatch.connect() as job:\n"
        "    ones = torch.ones(2)\n"
        "    job.sum_(ones, label='ones')\n"
        "    print(f'{ones.tolist()} {len(job.connection.control.secret) == 64}\\n', end='')\n"  # -u: one write a line
    )
    argv = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", str(script)]
    done = subprocess.run(
        [sys.executable, *argv], env=clean_environ(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[2.0, 2.0] True"] * 2
    assert "secret" not in done.stderr
