"""The reason that the log of a job states."""

import pytest

from bigbatch.tools.child import find_reason

CPU_MEMORY = "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"
GPU_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
JOB_MEMORY = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0"
TIME_LIMIT = "slurmstepd: error: *** JOB 7 ON n0 CANCELLED AT 2026-11-21T08:31:23 DUE TO TIME LIMIT ***"
UNFIT_LINE = "bigbatch: 2026-11-21 08:30:00 ended before training started: preflight ended with exit code 4"
OVER_TIME = "took longer than its time limit, and was ended"


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("step\nbigbatch: a\nbigbatch: b\n", 1, "b"),
        ("bigbatch: a\nbigbatch: rank 1 ended with exit code 1; ending the others\n", 1, "a"),
        ("bigbatch: rank 1 ended with exit code 1\n", 1, "rank 1 ended with exit code 1"),
        ("bigbatch: a\nbigbatch: rank 1 was ended by SIGSEGV\n", 139, "rank 1 was ended by SIGSEGV"),
        (f"{CPU_MEMORY}\nbigbatch: x", 1, f"out of memory: {CPU_MEMORY}"),
        (GPU_MEMORY, 1, f"out of memory: {GPU_MEMORY}"),
        ("bigbatch: out of memory: 9 does not fit", 1, "out of memory: 9 does not fit"),
        (JOB_MEMORY, None, f"out of memory: {JOB_MEMORY}"),
        ("", 137, "killed, most likely by the kernel, out of memory"),
        ("last words", 7, "exit code 7: last words"),
        ("", None, "the job ended, and printed nothing"),
        ("bigbatch: no such image\nbigbatch: 2026-11-21 08:30:00 ended with exit code 1", None, "no such image"),
        (f"bigbatch: n1: slow disk\n{UNFIT_LINE}", None, "n1: slow disk"),
        (f"bigbatch: 2026-11-21 08:30:00 ended with exit code 130\n{TIME_LIMIT}", None, OVER_TIME),
    ],
)
def test_reason_of_what_a_job_printed(text: str, code: int | None, reason: str) -> None:
    assert find_reason(text, exit_code=code) == reason
