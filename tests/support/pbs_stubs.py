"""Stand-ins for PBS's programs, as its manual has them; scripts run under the real bash, all nodes on this host."""

import os
import signal
import subprocess
import time
from pathlib import Path

JOB = "77"
TMRSH = """#!/bin/bash
# pbs_tmrsh HOST COMMAND: a task has the job's variables, and neither those of the shell that asks for it, nor its
# session and signals
printf '%s\\0' "$@" >> "$STUBS/tmrsh.argv"
stat -c %a logs/*-*/node >> "$STUBS/modes"
host=$1; shift
exec setsid --wait env -i --default-signal STUBS="$STUBS" PATH="$PATH" HOME="$HOME" OMP_NUM_THREADS=8 \\
  PBS_JOBID="$PBS_JOBID" PBS_O_WORKDIR="$PBS_O_WORKDIR" BIGBATCH_HOST="$host" ${STUB_CODES:+STUB_CODES="$STUB_CODES"} \\
  ${PYTHONPATH:+PYTHONPATH="$PYTHONPATH"} ${STUB_WAITS:+STUB_WAITS="$STUB_WAITS"} "$@"
"""
QSTAT = """#!/bin/sh
printf 'Job Id: %s\\n    Job_Name = bigbatch\\n' "$2"
[ -z "${STUB_LIMIT:-}" ] || printf '    Resource_List.walltime = %s\\n' "$STUB_LIMIT"
"""
SLEEP = """#!/bin/sh
echo "$1" >> "$STUBS/slept"
[ -n "${STUB_IS_OVER:-}" ] || exec tail -f /dev/null
"""
LAUNCHER = """#!/bin/bash
rank=0 before=""
for word; do [ "$before" != --node-rank ] || rank=$word; before=$word; done
printf '%s\\0' "$@" > "$STUBS/argv-$rank"
env -0 > "$STUBS/environ-$rank"
trap 'echo "$rank" >> "$STUBS/asked"; exit 130' TERM
touch "$STUBS/started-$rank"
if [[ "${STUB_WAITS:-}" = *"$rank"* ]]; then while :; do read -rt 0.05 <> <(:); done; fi
codes=(${STUB_CODES:-})
exit "${codes[rank]:-0}"
"""


class PbsStubs:
    """A folder with the programs, first on PATH, and with what they wrote down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in {"pbs_tmrsh": TMRSH, "qstat": QSTAT, "sleep": SLEEP, "bigbatch": LAUNCHER}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        # one line for each of mpiprocs
        (folder / "nodefile").write_text("n0\nn0\nn1\nn1\n")

    def environ(self, **variables: str) -> dict[str, str]:
        """Of a job's script."""
        job = {"PBS_JOBID": f"{JOB}.server", "PBS_O_WORKDIR": str(self.folder), "PBS_ENVIRONMENT": "PBS_BATCH"}
        job |= {"PBS_NODEFILE": str(self.folder / "nodefile"), "STUBS": str(self.folder), "STUB_LIMIT": "01:00:00"}
        return {**os.environ, **job, **variables, "PATH": f"{self.folder}:{os.environ['PATH']}"}

    def start(self, script: str, **variables: str) -> "subprocess.Popen[bytes]":
        """Run a script as PBS does: from a file, in a session of its own, and not in the folder of its submission."""
        path = self.folder / "script"
        path.write_text(script, errors="surrogateescape")
        return subprocess.Popen(
            ["bash", str(path)], cwd="/", env=self.environ(**variables), start_new_session=True, stderr=subprocess.PIPE
        )

    def run(self, script: str, *, sends: signal.Signals | None = None, **variables: str) -> tuple[int, str]:
        """Return its exit code, and its log; the signal goes to all its processes, as PBS's do, when both nodes run."""
        process = self.start(script, **variables)
        if sends is not None:
            deadline = time.monotonic() + 120
            while not all((self.folder / f"started-{rank}").exists() for rank in range(2)):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.killpg(process.pid, sends)
        _, errors = process.communicate(timeout=120)
        log = next((self.folder / "logs").glob("*.log"), None)
        return process.returncode, errors.decode() + (log.read_text() if log else "")

    def argv(self, rank: int) -> list[str]:
        """Of a node's launcher."""
        return (self.folder / f"argv-{rank}").read_text(errors="surrogateescape").split("\0")[:-1]

    def variables(self, rank: int) -> dict[str, str]:
        """Of a node's launcher."""
        words = (self.folder / f"environ-{rank}").read_text(errors="surrogateescape").split("\0")[:-1]
        return dict(word.split("=", 1) for word in words)

    def told(self, name: str) -> list[str]:
        """Return the lines that a program wrote down."""
        path = self.folder / name
        return path.read_text(errors="surrogateescape").splitlines() if path.exists() else []
