"""`bigbatch explain`: find the ranks that made a job hang, from their dumps of torch's flight recorder."""

import argparse
import gc
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bigbatch.comm.rendezvous.recording import Recording, RunsCode, read_recording
from bigbatch.errors import FAILED, FaultError, print_lines, tell
from bigbatch.files import as_json, read_plain
from bigbatch.paths import as_path
from bigbatch.tools.explain.culprits import STUCK, find_culprits
from bigbatch.tools.explain.verdict import describe_last_operation, headline, nothing_wrong, record, table

MAX_BYTES = 1 << 26
"""Largest dump: some fifty times the size of 2,000 operations with stack traces."""
MAX_DESCRIBED = 4
"""Most culprits of a finding for which the last operation is printed."""

_SUFFIXES = (".json", ".pickle", ".pkl")
_RANK = re.compile(r"rank[-_.]?(\d+)(?:-[a-z0-9_]{8})?$|(\d+)$")
"""End of a dump's name: torch's end in the rank; bigbatch's in a folder for temporary files have letters after it."""


def main(argv: Sequence[str]) -> int:
    """Name the culprits; return 0 if nothing is wrong, else FAILED. Raises: FaultError."""
    arguments = _parser().parse_args(argv)
    gc.disable()  # a thousand dumps are millions of objects, and all of them stay
    try:
        job, findings = find_culprits(read_dumps(find_dumps(arguments.dumps)))
    finally:
        gc.enable()
    if arguments.json:
        print(as_json(record(job, findings)))
        return FAILED if findings else 0
    if not findings:
        print_lines(nothing_wrong(job))
    for finding in findings:
        print_lines(headline(finding))
        for rank in finding.ranks[: MAX_DESCRIBED if finding.kind != STUCK else 1]:
            if rank in job.recordings:
                print_lines(f"  {describe_last_operation(job, rank)}")
    print_lines(f"\n{table(job, findings[0].group if findings else None)}")
    return FAILED if findings else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch explain",
        description="Read what torch's flight recorder wrote on each rank of a job that hung, and name the ranks that "
        "the others\nwait for, and the collective. A chain is followed to its end: a rank that is late because it "
        "waits for another in\nanother process group is not the culprit.",
        epilog="""\
a job writes such dumps when NCCL's time limit passes, one file per rank, if it was started with
  TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_BUFFER_SIZE=2000 TORCH_FR_DUMP_TEMP_FILE=/shared/job/trace_rank_
(older releases of torch: TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_NCCL_DEBUG_INFO_TEMP_FILE); a run of bigbatch
writes its own before it ends such a job, and prints their paths. The rank is the number that a file's name ends
in. Pickles and JSON are read, and no code in them is run.

possible findings, the likeliest cause first:
  left no dump         the process has ended, or its file is elsewhere
  calls ... as number  it calls another collective than most ranks, or with other sizes or types
  wait for each other  ranks wait in different groups, in a circle
  has not begun        its code has not reached the collective: see its last position
  has queued           it has queued the collective, and its GPU is busy or faulty
  is still in          others have completed the collective
  no rank is behind    all are in the collective: the network or a GPU is at fault

exit code: 0 nothing is wrong, 1 a cause was found, 2 the dumps cannot be read

example: bigbatch explain /shared/job""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("dumps", type=as_path, nargs="+", metavar="DUMPS", help="folders that hold dumps, or the files")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for machines")
    return parser


def find_dumps(paths: Sequence[Path]) -> dict[int, list[Path]]:
    """Return the files of each rank, by their names. Raises: FaultError if there is none, or a name has no rank."""
    found: dict[int, list[Path]] = {}
    for path in paths:
        try:
            path.stat()  # raises if it does not exist
            files = sorted(each for each in path.iterdir() if not each.is_dir()) if path.is_dir() else [path]
            if path.is_dir() and all(rank_of(each) is None for each in files):
                files = sorted(path.glob("*/*"))  # such as a subfolder for each node
        except OSError as error:
            raise FaultError(f"{path}: {error.strerror}") from error
        for file in files:
            rank = rank_of(file)
            if rank is not None and file not in found.get(rank, ()):
                found.setdefault(rank, []).append(file)
            elif rank is None and file == path:
                raise FaultError(f"{file}: its name does not end in a rank, as in trace_rank_3")
    if not found:
        raise FaultError(f"{', '.join(map(str, paths))}: no dumps here; their names end in a rank, as trace_rank_3")
    return found


def rank_of(path: Path) -> int | None:
    """Return the rank at the end of a file's name; None if there is none."""
    name = path.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    match = _RANK.search(name)
    return int(match[1] or match[2]) if match and len(match[0]) < 30 else None


def read_dumps(files: Mapping[int, Sequence[Path]]) -> dict[int, Recording]:
    """Read each rank's dump; report other files on stderr. Raises: FaultError, also for a dump with code."""
    recordings: dict[int, Recording] = {}
    reasons = []
    for rank, paths in sorted(files.items()):
        read = []
        for path in paths:
            try:
                read.append((path, read_dump(path)))
            except FaultError as error:
                if isinstance(error.__cause__, RunsCode):
                    raise
                reasons.append(str(error))
        # torch's dump and bigbatch's of one job have the same name, except for .json
        jobs = {path.with_name(path.name.removesuffix(".json")) for path, _ in read}
        if len(read) > 2 or len(jobs) > 1:
            names = " and ".join(str(path) for path, _ in read[:2])
            raise FaultError(f"rank {rank} has several dumps, {names}: name those of one job")
        # torch's dump has call stacks, bigbatch's does not
        for _, recording in sorted(read, key=lambda pair: pair[0].suffix == ".json")[:1]:
            recordings[rank] = recording
    if not recordings:
        raise FaultError(reasons[0])
    if not any(each.operations for each in recordings.values()):
        names = ", ".join(sorted({str(path.parent) for paths in files.values() for path in paths}))
        raise FaultError(f"{names}: the dumps hold no operations; start the job with TORCH_FR_BUFFER_SIZE=2000")
    for reason in reasons:
        tell(f"not read: {reason}")
    return recordings


def read_dump(path: Path) -> Recording:
    """Read one file. Raises: FaultError naming it."""
    try:
        return read_recording(read_plain(path, most=MAX_BYTES))
    except OSError as error:
        raise FaultError(f"{path}: {error.strerror}") from error
    except KeyError as error:
        raise FaultError(f"{path}: no dump of torch's flight recorder: it lacks {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FaultError(f"{path}: no dump of torch's flight recorder: {error}") from error
