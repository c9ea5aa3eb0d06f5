"""What a shell completes at TAB: asked of a real bash; the scripts for zsh and fish hold the same words."""

import shlex
import subprocess

import pytest

from bigbatch.cli import COMMANDS, main
from bigbatch.launch.launchers.registry import LAUNCHERS
from bigbatch.trainer.config.file import packaged_configs
from bigbatch.trainer.config.kinds import OPTION_KEYS
from bigbatch.trainer.config.schema import KEYS

CASES = {
    # words; the last one is completed -> what bash offers
    ("tr",): {"train"},
    ("",): {*COMMANDS},
    ("launch", ""): {*LAUNCHERS, "preflight", "status", "cancel", "emulate"},
    ("launch", "local", "--ra"): {"--ranks", "--ranks-per-node"},
    ("launch", "local", "--ranks", "2", "--", "ev"): {"evaluate"},
    ("launch", "local", "--", "train", "--config", "quick"): {"quickstart"},
    ("launch", "local", "--", "train", "--optimizer.ema"): {
        "--optimizer.ema_decay",
        "--optimizer.ema_every_steps",
        "--optimizer.ema_warmup",
    },
    ("train", "--"): {
        "--config",
        "--dry-run",
        "--quiet",
        "--gpus",
        "--trust-code",
        *(f"--{key}" for key in (*KEYS, *OPTION_KEYS)),
    },
    ("train", "--config", ""): {*packaged_configs()},
    ("train", "x"): set(),  # a file's name
    ("config", "sh"): {"show"},
    ("config", "show", "imagenet/resnet50_8"): {"imagenet/resnet50_8k"},
    ("comm", ""): {"bench", "tune"},
    ("data", "p"): {"prepare", "pack"},
    ("sweep", "scaling_"): {"scaling_slurm"},
    ("init", "pets", "--like", "imagenett"): {"imagenette"},
}


def test_completion_of_a_real_bash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    lines = [capsys.readouterr().out]
    for words in CASES:
        lines.append(f"COMP_WORDS=(bigbatch {shlex.join(words)}) COMP_CWORD={len(words)}; _bigbatch")
        lines.append('echo "${COMPREPLY[*]}"')
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    offered = [set(line.split()) for line in done.stdout.splitlines()]
    assert dict(zip(CASES, offered, strict=True)) == CASES


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_other_shells_has_the_same_words(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    held = {*capsys.readouterr().out.replace('"', " ").split()}
    assert set().union(*CASES.values()) <= held
