"""All measurements of comm on emulated clusters: one JSON file per case, then a summary in Markdown.

    python -m benchmarks.comm.run --out benchmarks/results            # about 20 minutes
    python -m benchmarks.comm.run --only scaling --out benchmarks/results

Leave the machine alone meanwhile. Needs what `bigbatch launch emulate` needs, iperf3, and for Horovod mpi4py and
a build of it with MPI.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.comm.cases import Case, choose_cases
from benchmarks.comm.summary import read_records, summarise

MAX_TIMES_LONGER = 4
"""Factor of a case's expected time after which it is ended."""
STOP_SECONDS = 20


def main() -> int:
    """Run the cases, print the summary; return 1 if a case failed."""
    options = parse()
    if options.list:
        for case in options.cases:
            print(f"{case.name:40} about {case.seconds:5} s{'  (--long)' if case.is_long else ''}")
        return 0
    total = sum(case.seconds for case in options.cases)
    print(f"{len(options.cases)} cases, about {total / 60:.0f} minutes", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    failed = [case.name for case in options.cases if not run_case(case, out=options.out)]
    text = summarise(read_records(options.out))
    (options.out / "comm-summary.md").write_text(text + "\n")
    print(text)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder (default: %(default)s)")
    add("--long", action="store_true", help="also those of scaling")
    add("--only", default="", metavar="NAME,...", help="only cases with one of these in their names")
    add("--list", action="store_true", help="name the cases and how long they take")
    options = parser.parse_args()
    try:
        only = [word for word in options.only.split(",") if word]
        options.cases = choose_cases(long=options.long or options.list, only=only)
    except ValueError as error:
        parser.error(str(error))
    return options


def run_case(case: Case, *, out: Path) -> bool:
    """Run one case; tell whether it ended without an error."""
    path = (out / f"comm-{case.name}.json").resolve()
    path.unlink(missing_ok=True)  # if the case fails, an earlier run's record must not stand for it
    print(f"\n== {case.name}, about {case.seconds} s ==", file=sys.stderr, flush=True)
    start = time.monotonic()
    process = subprocess.Popen(case.command(path))
    try:
        code: int | str = process.wait(timeout=MAX_TIMES_LONGER * case.seconds)
    except subprocess.TimeoutExpired:
        code = f"took longer than {MAX_TIMES_LONGER * case.seconds} s"
    finally:
        stop(process)
    print(f"== {case.name}: {code or 'done'}, {time.monotonic() - start:.0f} s ==", file=sys.stderr, flush=True)
    return code == 0


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Wait until the emulated cluster is removed; kill what is left."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.terminate()  # nothing, if it has ended
        process.wait(timeout=STOP_SECONDS)
        return
    process.kill()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
