"""Facts on GPUs from nvidia-smi and the kernel: a stand-in prints what NVIDIA's manual page documents."""

from collections.abc import Callable
from pathlib import Path

import pytest
from host_tree import add_gpu_on_bus, write

from bigbatch.trainer.machine import nvidia
from bigbatch.trainer.machine.nvidia import Driver, NvLinks, count_gpus_on_bus, has_gpudirect, query_driver, read_xids

GPU = "NVIDIA H100 80GB HBM3, 570.86.15, 1980 MHz, 1980 MHz, 31"
LINKS = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-b)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
GPU 2: NVIDIA H100 PCIe (UUID: GPU-c)
"""

Smi = Callable[..., None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Install a stand-in that answers a question by its first word; other questions are refused."""

    def install(*answers: tuple[str, str], code: int = 0) -> None:
        cases = "".join(f"*{word}*) cat <<'END'\n{text}\nEND\nexit {code};;\n" for word, text in answers)
        refused = "*) echo 'Field \"x\" is not a valid field to query.'; exit 2;;"
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}{refused}\nesac\n')
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    return install


def test_driver_that_answers_all(smi: Smi) -> None:
    smi(
        ("query-gpu=name", f"{GPU}\n{GPU}"),
        ("query-gpu=uuid", "GPU-a, 16, 16, 0, Disabled\nGPU-b, 8, 16, [N/A], [N/A]"),
        ("query-remapped-rows", "GPU-a, 0, 0\nGPU-b, 1, 0"),
        ("query-compute-apps", "4711, GPU-a\n4712, GPU-b"),
        ("nvlink", LINKS),
    )
    driver = query_driver()
    assert (driver.gpus, driver.complaint) == ((GPU, GPU), None)
    assert driver.health["GPU-b"] == {
        "uuid": "GPU-b",
        "pcie.link.width.current": "8",
        "pcie.link.width.max": "16",
        "ecc.errors.uncorrected.volatile.total": "[N/A]",
        "mig.mode.current": "[N/A]",
        "gpu_uuid": "GPU-b",
        "remapped_rows.pending": "1",
        "remapped_rows.failure": "0",
    }
    assert driver.processes == ({"pid": "4711", "gpu_uuid": "GPU-a"}, {"pid": "4712", "gpu_uuid": "GPU-b"})
    assert driver.links == {0: NvLinks(2, 0), 1: NvLinks(1, 1)}


MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
LOST = "Unable to determine the device handle for GPU3: 0000:5F:00.0: Unknown Error"


@pytest.mark.parametrize(
    ("question", "said", "code", "driver"),
    [
        ("query-gpu=name", GPU, 0, Driver(gpus=(GPU,))),  # an older driver, which does not know the other questions
        ("query", f"{MISMATCH}\nNVML library version: 570.86", 18, Driver(complaint=MISMATCH)),
        ("query", "\x1b[31m", 9, Driver(complaint="[31m")),
        ("query", "", 9, Driver(complaint="exit code 9")),
        ("query", f"{GPU}\n{LOST}", 0, Driver(gpus=(GPU,), complaint=LOST)),
        ("query", f"{GPU}\n{LOST}", 15, Driver(gpus=(GPU,), complaint=LOST)),
        # a warning beside all rows
        ("query-gpu=name", f"{GPU}\nWARNING: infoROM is corrupted at gpu 0000:06:00.0", 14, Driver(gpus=(GPU,))),
        ("query", "No devices were found", 6, Driver()),
    ],
)
def test_driver_is_what_the_program_says(smi: Smi, question: str, said: str, code: int, driver: Driver) -> None:
    smi((question, said), code=code)
    assert query_driver() == driver


def test_host_without_the_program_has_no_complaint(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert query_driver() == Driver()


def test_driver_that_hangs_is_told(tmp_path: Path, smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi()
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(nvidia, "QUERY_SECONDS", 0.1)
    assert query_driver() == Driver(complaint="no answer within 0.1 s")


def test_driver_that_hangs_at_a_later_question_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    late = "no answer within 8 s"
    monkeypatch.setattr(nvidia, "_query", lambda *words: ([GPU], None) if "=name" in words[0] else ([], late))
    assert query_driver() == Driver(gpus=(GPU,), complaint=late)


def test_complaint_is_told_and_not_a_row_beside_it(tmp_path: Path, smi: Smi) -> None:
    smi()
    (tmp_path / "bin/nvidia-smi").write_text(f"#!/bin/sh\necho '{GPU}'\necho 'Unknown Error' >&2\nexit 255\n")
    assert query_driver() == Driver(gpus=(GPU,), complaint="Unknown Error")


def test_gpus_on_the_bus_are_nvidias_displays(tmp_path: Path) -> None:
    assert count_gpus_on_bus(tmp_path) == 0
    add_gpu_on_bus(tmp_path, "0000:3b:00.0")
    add_gpu_on_bus(tmp_path, "0000:5e:00.0", kind="0x030000")
    add_gpu_on_bus(tmp_path, "0000:60:00.0", kind="0x068000")  # an NVSwitch
    add_gpu_on_bus(tmp_path, "0000:00:02.0", vendor="0x8086", kind="0x030000")
    assert count_gpus_on_bus(tmp_path) == 2


@pytest.mark.parametrize(
    ("modules", "kernel", "version", "may"),
    [
        ("nvidia_peermem 16384 0 - Live 0x0\nnvidia 9 1 - Live 0x0", "5.4.0-150-generic", "Kernel Module", True),
        ("nv_peer_mem 16384 0 - Live 0x0", "4.18.0", "", True),
        ("nvidia 9 1 nvidia_peermem, Live 0x0", "6.8.0-60-generic", "NVIDIA UNIX x86_64 Kernel Module", False),
        ("nvidia 9 1 - Live 0x0", "6.8.0-60-generic", "NVIDIA UNIX Open Kernel Module for x86_64", True),
        ("nvidia 9 1 - Live 0x0", "5.12.0", "NVIDIA UNIX Open Kernel Module for x86_64", True),
        ("nvidia 9 1 - Live 0x0", "5.11.22", "NVIDIA UNIX Open Kernel Module for x86_64", False),
        ("", "", "", False),
    ],
)
def test_gpudirect_by_a_module_or_by_dmabuf(tmp_path: Path, modules: str, kernel: str, version: str, may: bool) -> None:
    write(tmp_path, "proc/modules", modules)
    write(tmp_path, "proc/sys/kernel/osrelease", kernel)
    write(tmp_path, "proc/driver/nvidia/version", f"NVRM version: {version}  570.86.15")
    assert has_gpudirect(tmp_path) is may


def test_xids_are_those_of_the_hardware(tmp_path: Path) -> None:
    assert read_xids(tmp_path) == {}
    lost = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
    own = "NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python, MMU Fault"
    write(tmp_path, "dev/kmsg", f"3,900,12,-;{lost}\n3,901,13,-;{own}\n4,902,14,-;eth0: link up\n3,903,15,-;{lost}")
    assert read_xids(tmp_path) == {"Xid 79 of 0000:3b:00": 2}
