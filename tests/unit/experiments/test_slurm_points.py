"""Points that go through Slurm's queue."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from error_texts import naming
from small_sweep import ENDED, FIRST, states, write

from bigbatch.cli import main
from bigbatch.errors import SchedulerError
from bigbatch.experiments.engine import slurm as queueing
from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.launch.launchers import slurm_queue

SBATCH = r"""#!/bin/sh
cat > "$STUBS/script"
if grep -q -- "--nodes=${STUB_REFUSES:-none}\$" "$STUBS/script"; then
  echo "sbatch: error: Node count specification invalid" >&2; exit 1
fi
mv "$STUBS/script" "$STUBS/script-$(ls "$STUBS" | grep -c script-)"
echo 7
"""
SQUEUE = """#!/bin/sh
for word in "$@"; do
  case $word in --name=*)
    [ -n "$STUB_FORGETS" ] && exit 0
    grep -qx "#SBATCH --job-name=${word#--name=}" "$STUBS"/script-* && echo 7
    exit 0 ;;
  esac
done
[ -s "$STUBS/down" ] && { cat "$STUBS/down" >&2; exit 1; }
cat "$STUBS/queue"
"""


@pytest.fixture
def slurm(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stubs = file.with_name("stubs")
    stubs.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{stubs}:{os.environ['PATH']}")
    monkeypatch.setenv("STUBS", str(stubs))
    monkeypatch.setattr(queueing, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(queueing, "POLL_SECONDS", 0.01)
    (stubs / "queue").write_text("3\n7_0\n7_1\n9_[0-5]\n")
    write(file, where="slurm", launch={"partition": "gpu"}, grid={"ranks": [1], "run.seed": [4, 5]})
    return stubs


def finish(folder: SweepFolder) -> None:
    """Leave the summary of point 0."""
    folder.run(0).path.mkdir()
    folder.run(0).summary.write_text(json.dumps({"images_per_second": 1234.5}))


@pytest.mark.long
def test_sweep_points_go_through_the_slurm_queue(file: Path, slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", str(file), "--folder", "f"]
    assert main([*command, "--no-wait"]) == 0
    folder = SweepFolder(Path("f"))
    assert states(folder) == ["submitted", "submitted"]
    script = (slurm / "script-0").read_text()
    assert "#SBATCH --array=0,1\n" in script
    assert "#SBATCH --signal=B:USR1@0\n" in script, "a point at its time limit does not continue"
    assert "2 points are in Slurm's queue (scancel 7 would end them)" in capsys.readouterr().out
    assert queueing.queued(["7"]) == {("7", 0), ("7", 1)}
    (slurm / "queue").write_text("")
    finish(folder)
    log = folder.path / folder.read_state(1)["log"]
    name = folder.read_state(1)["job_name"]
    assert f"#SBATCH --job-name={name}\n" in script
    assert log == Path(f"f/logs/{name}-7_1.log")
    log.write_text(f"{FIRST}\nbigbatch: rank 1 on n1 does not answer\n{ENDED}\n".replace("code 0", "code 1"))
    assert main(command) == 3
    assert states(folder) == ["done", "failed"]
    assert folder.read_state(1)["reason"] == "rank 1 on n1 does not answer"
    assert len(list(slurm.glob("script-*"))) == 1, "nothing was submitted twice"


@pytest.mark.long
@pytest.mark.parametrize(
    ("known", "has_log", "submissions"),
    [("squeue", False, 1), ("forgotten", True, 1), ("forgotten", False, 2)],
)
def test_sweep_that_ended_before_it_knew_its_slurm_jobs_number_does_not_submit_twice(
    known: str, has_log: bool, submissions: int, file: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    command, folder = ["sweep", str(file), "--folder", "f", "--no-wait"], SweepFolder(Path("f"))
    with monkeypatch.context() as patched:
        patched.setattr(queueing, "_note_job", die)
        assert main(command) == 130
    assert [folder.read_state(number)["job"] for number in (0, 1)] == [None, None]
    if has_log:
        (folder.logs / f"{folder.read_state(0)['job_name']}-7_1.log").touch()
    if known == "forgotten":
        monkeypatch.setenv("STUB_FORGETS", "1")
    assert main(command) == 0
    assert len(list(slurm.glob("script-*"))) == submissions
    for number in (0, 1):
        state = folder.read_state(number)
        assert (state["state"], state["job"]) == ("submitted", "7")
        assert state["log"] == f"logs/{state['job_name']}-7_{number}.log"


@pytest.mark.long
def test_sweep_waits_for_cancelled_slurm_points_together(
    file: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing came of them, and their files may only be late."""
    command = ["sweep", str(file), "--folder", "f"]
    assert main([*command, "--no-wait"]) == 0
    (slurm / "queue").write_text("")
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(queueing, "time", clock)
    monkeypatch.setattr(queueing, "SETTLE_SECONDS", 30.0)
    monkeypatch.setattr(queueing, "POLL_SECONDS", 5.0)
    assert main(command) == 3
    assert now == [30.0]
    assert states(SweepFolder(Path("f"))) == ["failed", "failed"]


@pytest.mark.slow
def test_sweep_says_at_ctrl_c_what_goes_on_in_slurm(
    file: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(queueing.time, "sleep", press)
    assert main(["sweep", str(file), "--folder", "f"]) == 130
    assert re.fullmatch(r"bigbatch: stopped; 2 points .*\bscancel 7\b.*\n", capsys.readouterr().err)
    assert states(SweepFolder(Path("f"))) == ["submitted", "submitted"]


@pytest.mark.long
def test_sweep_array_that_slurm_refuses_fails_alone_and_in_its_words(
    file: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Point 1, of two nodes; point 0 is collected by the same command."""
    write(file, where="slurm", launch={}, grid={"ranks": [1, 4]})
    monkeypatch.setenv("STUB_REFUSES", "2")
    command, folder = ["sweep", str(file), "--folder", "f"], SweepFolder(Path("f"))
    assert main([*command, "--no-wait"]) == 3
    assert states(folder) == ["submitted", "failed"]
    reason = "sbatch: error: Node count specification invalid"
    assert re.search(rf"point 1 \(ranks=4\): failed: .*{reason}", capsys.readouterr().out)
    (slurm / "queue").write_text("")
    finish(folder)
    assert main(command) == 3
    assert states(folder) == ["done", "failed"]
    assert folder.read_state(1)["reason"].count(reason) == 1
    monkeypatch.delenv("STUB_REFUSES")
    (slurm / "queue").write_text("7_1\n")
    assert main([*command, "--retry-failed", "--no-wait"]) == 0
    assert states(folder) == ["done", "submitted"]


@pytest.mark.slow
def test_sweep_refuses_nothing_where_slurm_does_not_answer(
    file: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Unable to contact controller' >&2; exit 1\n")
    (slurm / "squeue").write_text("#!/bin/sh\necho 'Unable to contact controller' >&2; exit 1\n")
    assert main(["sweep", str(file), "--folder", "f"]) == 1
    assert "sbatch: error: Unable to contact controller" in capsys.readouterr().err
    assert states(SweepFolder(Path("f"))) == ["submitted", "submitted"], "the same command asks again"


@pytest.mark.long
def test_sweep_takes_a_slurm_queue_that_does_not_answer_for_no_end_of_jobs(
    file: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers again after three minutes, at first; then it answers no more."""
    command, folder = ["sweep", str(file), "--folder", "f"], SweepFolder(Path("f"))
    assert main([*command, "--no-wait"]) == 0
    (slurm / "down").write_text("slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(SchedulerError, match="Unable to contact slurm controller"):
        queueing.queued(["7"])
    assert main([*command, "--no-wait"]) == 0
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] == 180:
            (slurm / "down").unlink()
            (slurm / "queue").write_text("7_1\n")
            finish(folder)
        if now[0] == 240:
            (slurm / "down").write_text("slurm_load_jobs error: Unable to contact slurm controller")

    monkeypatch.setattr(queueing, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(queueing, "POLL_SECONDS", 60.0)
    capsys.readouterr()
    assert main(command) == 1
    assert now == [180 + 600]
    assert states(folder) == ["done", "submitted"]
    error = capsys.readouterr().err
    assert error.count("Unable to contact slurm controller); jobs continue") == 2, "once an outage"
    assert len(error.splitlines()) == 3


def test_sweep_ends_a_program_of_slurm_that_hangs(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(slurm_queue, "ANSWER_SECONDS", 0.1)
    with pytest.raises(SchedulerError, match=naming("squeue", "0.1 s")):
        queueing.queued(["7"])


@pytest.mark.long
def test_sweep_without_waiting_collects_points_that_left_the_slurm_queue(
    file: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, folder = ["sweep", str(file), "--folder", "f", "--no-wait"], SweepFolder(Path("f"))
    assert main(command) == 0
    (slurm / "queue").write_text("7_1\n")
    finish(folder)
    capsys.readouterr()
    assert main(command) == 0
    assert states(folder) == ["done", "submitted"]
    printed = capsys.readouterr().out
    assert "1,234 images/s" in printed
    assert "1 point is in Slurm's queue (scancel 7 would end them)" in printed
    (slurm / "queue").write_text("")
    assert main(command) == 3
    assert states(folder) == ["done", "failed"]
