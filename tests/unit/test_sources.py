"""The page of sources names keys, commands and configs that exist, and every trick of the ablation."""

import re
from pathlib import Path

import pytest

from bigbatch.cli import main
from bigbatch.experiments.engine.plan import read_plan
from bigbatch.trainer.config.file import PACKAGED, packaged_configs
from bigbatch.trainer.config.schema import SECTIONS, key_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/sources.md").read_text()
WORDS = sorted(set(re.findall(r"`([^`]+)`", PAGE)))
NAMED = [word for word in WORDS if re.match(rf"({'|'.join(SECTIONS)})\.", word)]
COMMANDS = [word for word in WORDS if word.startswith("bigbatch ")]
FILES = [word for word in WORDS if word.startswith("python ")]
CONFIGS = [word for word in WORDS if re.fullmatch(r"(imagenet|pilots)/\w+|cifar\w+", word)]


def test_sources_names_enough_to_be_looked_at() -> None:
    assert len(NAMED) > 30
    assert min(len(COMMANDS), len(FILES), len(CONFIGS)) > 1


@pytest.mark.parametrize("word", NAMED)
def test_sources_names_keys_that_exist(word: str) -> None:
    assert key_of(word.partition(":")[0]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_sources_names_commands_that_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.split()[1:]
    if words[0] == "sweep" and len(words) > 1:
        assert read_plan(PACKAGED / f"sweeps/{words[1]}.yaml").cases
        words = words[:1]
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main([*words, "--help"]))
    assert ended.value.code in (0, None), capsys.readouterr().err


@pytest.mark.parametrize("words", FILES)
def test_sources_names_scripts_that_exist(words: str) -> None:
    name = words.removeprefix("python ").removeprefix("-m ").split()[0]
    path = name if name.endswith(".py") else f"{name.replace('.', '/')}.py"
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("name", CONFIGS)
def test_sources_names_configs_that_exist(name: str) -> None:
    assert name in packaged_configs()


def test_sources_has_a_row_for_each_trick() -> None:
    rows = re.findall(r"^\|", PAGE.partition("## Bag of tricks")[2].partition("\n## ")[0], re.M)
    # the first step is the second's trick switched off; two lines are the table's head
    assert len(rows) - 2 == len(read_plan(PACKAGED / "sweeps/bag_of_tricks.yaml").cases) - 1
