"""Stand-ins for Slurm's programs, which write down how they were called; scripts run under the real bash."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

JOB = "77"
SRUN = f"""#!{sys.executable}
import os, pathlib, signal, sys, time
place = pathlib.Path(os.environ["STUBS"])
if sys.argv[-1] == "true":  # is the node there?
    (node,) = [word.partition("=")[2] for word in sys.argv if word.startswith("--nodelist=")]
    sys.exit(node in os.environ.get("STUB_LOST", "").split())
calls_so_far = (place / "srun.calls").stat().st_size if (place / "srun.calls").exists() else 0
(place / "srun.argv").write_bytes(os.fsencode("\\0".join(sys.argv[1:])))
(place / "srun.environ").write_bytes(os.fsencode("\\0".join(map("=".join, os.environ.items()))))
def stop(number, frame):
    while "STUB_SAVES" in os.environ and not (place / "signalled").exists():  # a checkpoint
        time.sleep(0.02)
    sys.exit(int(os.environ["STUB_STOPPED"]))
if os.environ.get("STUB_STOPPED"):
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, stop)
(place / "srun.aside").write_text(str(os.getpid()))
(place / "srun.aside").rename(place / "srun.pid")  # which is whole as soon as it is there
if os.environ.get("STUB_WAITS"):
    signal.pause()
    time.sleep(20)
with open(place / "srun.calls", "a") as calls:
    calls.write(".")
if record := os.environ.get("STUB_RECORD"):
    pathlib.Path(os.environ["BIGBATCH_STOPPED"]).write_text(record)
codes = os.environ.get("STUB_CODE", "0").split()
code = codes[min(calls_so_far, len(codes) - 1)]
while code == "wait":  # for the request to stop; pause() would miss one that came just before
    time.sleep(0.05)
sys.exit(int(code))
"""
SCONTROL = """#!/bin/sh
echo "$@${SLURM_JOB_ID:+ in a job}" >> "$STUBS/scontrol.calls"
case "$1 $2" in
  "show hostnames") printf 'n%s\n' 0 1 2 3 ;;
  "show "*) echo "JobId=77 PreemptTime=${STUB_PREEMPT:-None}" ;;
  "requeue "*) exit "${STUB_REQUEUE:-0}" ;;
esac
"""
SCANCEL = """#!/bin/sh
kill -TERM "$(cat "$STUBS/srun.pid")"
"""
SLEEP = """#!/bin/sh
echo "$@" >> "$STUBS/sleep.calls"
"""


class Stubs:
    """A folder with the programs, first on PATH, and with what they wrote down."""

    def __init__(self, folder: Path, *, shows_logs: bool = False) -> None:
        """Without shows_logs, tail does nothing: it looks once a second whether it is done."""
        self.folder = folder
        programs = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "sleep": SLEEP}
        if not shows_logs:
            programs["tail"] = "#!/bin/sh\n"
        for name, text in programs.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def environ(self, **variables: str) -> dict[str, str]:
        """Return the environment of a batch script."""
        slurm = {"SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "n[0-1]", "STUBS": str(self.folder)}
        array = {"SLURM_ARRAY_JOB_ID": JOB, "SLURM_ARRAY_TASK_ID": "5"}
        return {**os.environ, **slurm, **array, **variables, "PATH": f"{self.folder}:{os.environ['PATH']}"}

    def start(self, script: str, **variables: str) -> "subprocess.Popen[str]":
        """Run a batch script as slurmd does: from a file, and in the folder of its submission."""
        path = self.folder / "script"
        path.write_text(script, errors="surrogateescape")
        output = subprocess.PIPE
        return subprocess.Popen(
            ["bash", str(path)], cwd=self.folder, env=self.environ(**variables), stdout=output, text=True
        )

    def run(self, script: str, *signals: signal.Signals, **variables: str) -> tuple[int, str]:
        """Its exit code and output; signals are sent as soon as the ranks run, which do not end before the last."""
        (self.folder / "signalled").unlink(missing_ok=True)
        process = self.start(script, **variables, **({"STUB_SAVES": "1"} if signals else {}))
        if signals:
            deadline = time.monotonic() + 200
            while not (self.folder / "srun.pid").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            time.sleep(0.2)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.1)
        (self.folder / "signalled").touch()
        output, _ = process.communicate(timeout=200)
        return process.returncode, output

    def argv(self) -> list[str]:
        """Return the arguments of srun."""
        return (self.folder / "srun.argv").read_text(errors="surrogateescape").split("\0")

    def variables(self) -> dict[str, str]:
        """The environment of srun."""
        words = (self.folder / "srun.environ").read_text(errors="surrogateescape").split("\0")
        return dict(word.split("=", 1) for word in words)

    def num_starts(self) -> int:
        """How often srun came to its end by itself."""
        return (self.folder / "srun.calls").stat().st_size

    def scontrol_calls(self) -> list[str]:
        """Return its arguments, and whether its environment said that it runs in the job."""
        calls = self.folder / "scontrol.calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def requeued(self) -> bool:
        """The script put its job back into the queue, and waited for the end."""
        asked = f"requeue {JOB} in a job" in self.scontrol_calls()
        return asked and (self.folder / "sleep.calls").read_text().splitlines() == ["600"]
