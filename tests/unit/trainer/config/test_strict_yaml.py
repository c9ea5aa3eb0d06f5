"""Values mean what is written, in files and in options alike, and what is written out is read back."""

import re
from pathlib import Path

import pytest
import yaml
from error_texts import naming

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.strict_yaml import as_yaml, dump_yaml, parse_yaml

ROOT = Path(__file__).resolve().parents[4]
OLD_FORMS = (
    *("010", "0x1F", "0o17", "0b1", "1_000", "190:20:30", "1_0.5", "1:30.5"),
    *("no", "Yes", "ON", "y", "tRUE", "2026-01-01", "=", "<<", "2001-99-99", "0x_"),
)
"""What YAML 1.1 reads as something else than the text, or refuses."""
TEXTS = (*OLD_FORMS, "null", "~", "", "1e5", "true", ".inf", "12", "a\nb", " a", "&a", "*a", "!x", "#", "a: b", "é")
READS = re.compile(r"\byaml\.\w*(load|compose|parse|scan)|SafeLoader|from yaml import|import yaml as")


@pytest.mark.parametrize("word", OLD_FORMS)
def test_forms_of_yaml_1_1_are_text(word: str, tmp_path: Path) -> None:
    assert parse_yaml(word) == word
    assert parse_yaml(f"{{{word}: [{word}]}}") == {word: [word]}
    path = tmp_path / "a.yaml"
    path.write_text(f"base: quickstart\nrun: {{directory: {word}}}\nmodel: {{frozen: [{word}]}}\n")
    options = ["--run.directory", word, "--model.frozen", f"[{word}]"]
    for config in (load_config(["--config", str(path)]), load_config(["--config", "quickstart", *options])):
        assert config.run.directory == word
        assert config.model.frozen == (word,)


@pytest.mark.parametrize("word", ["010", "0x1F", "1_000", "1:30", "no", "ON", "2026-01-01"])
def test_forms_of_yaml_1_1_are_refused_in_dicts_that_no_type_checks(word: str) -> None:
    """SGD(nesterov="no") does what nesterov is to do, and a config of an older release stated false by it."""
    words = ["--config", "quickstart", "--optimizer.name", "torch.optim.SGD", "--optimizer.options"]
    with pytest.raises(ConfigError, match=naming("optimizer.options", word, "quotes")):
        load_config([*words, f"{{momentum: 0.9, nesterov: [{word}]}}"])
    assert load_config([*words, f"{{nesterov: '{word}'}}"]).optimizer.options == {"nesterov": word}


@pytest.mark.parametrize(
    ("key", "word", "advice"),
    [
        ("run.epochs", "010", "; write 10 for 010"),
        ("run.epochs", "1_000", "; write 1000 for 1_000"),
        ("run.seed", "0x1F", "; write 31 for 0x1F"),
        ("run.seed", "0o17", "; write 15 for 0o17"),
        ("run.seed", "1:30", ""),
        ("run.seed", "2026-01-01", ""),
        ("run.seed", "no", ""),
        ("schedule.base_lr", "010", "; write 10 for 010"),
        ("data.flip", "no", "; write false for no"),
        ("data.flip", "Yes", "; write true for Yes"),
        ("data.flip", "0", ""),
        ("compute.compile", "off", ""),
    ],
)
def test_forms_of_yaml_1_1_are_refused_by_what_was_typed(key: str, word: str, advice: str, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    path = tmp_path / "a.yaml"
    path.write_text(f"base: quickstart\n{section}: {{{name}: {word}}}\n")
    for words in (["--config", str(path)], ["--config", "quickstart", f"--{key}={word}"]):
        with pytest.raises(ConfigError) as caught:
            load_config(words)
        assert re.fullmatch(rf"{re.escape(f'{key}={word}')} must be [^;]*{re.escape(advice)}", str(caught.value))


@pytest.mark.parametrize(("word", "value"), [("+5", 5), ("-0", 0), ("5.", 5.0), (".5", 0.5), ("1e-4", 1e-4)])
def test_decimal_numbers_are_numbers(word: str, value: float) -> None:
    assert parse_yaml(word) == value
    assert type(parse_yaml(word)) is type(value)


@pytest.mark.parametrize(
    "node",
    [
        *("!!int x", "!!int", "!!timestamp x", "!!bool x", "!!binary x", "!!float x", "!!str x", "!!null x"),
        *("!!python/object/apply:os.system [ls]", "!!python/none", "!local x", "! x", "!!set {a, b}", "!!map {a: 1}"),
        *("&a x", "*a", "[&a x, *a]"),
    ],
)
def test_tags_anchors_and_aliases_are_refused_by_file_and_line(node: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"base: quickstart\nrun:\n  seed: {node}\n")
    with pytest.raises(ConfigError, match=naming(f"{path} ", "line 3", node.strip("[]").split()[0])) as caught:
        load_config(["--config", str(path)])
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=naming(f"run.seed={node} must be int: ")):
        load_config(["--config", "quickstart", f"--run.seed={node}"])


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(text: str) -> None:
    for value in (text, [text], {text: {"k": text}}):
        assert parse_yaml(dump_yaml(value)) == value
        assert parse_yaml(as_yaml(value)) == value
        assert "\n" not in as_yaml(value)
    # and for readers of YAML 1.1
    assert yaml.safe_load(as_yaml(text)) == yaml.safe_load(dump_yaml([text]))[0] == text


def test_what_is_in_two_places_is_written_twice() -> None:
    shared = [1, "a"]
    assert parse_yaml(dump_yaml({"a": shared, "b": shared})) == {"a": shared, "b": shared}


def test_dicts_keep_their_order() -> None:
    assert as_yaml({"fc.*": 1, "*": 0.1}) == "{fc.*: 1, '*': 0.1}"


@pytest.mark.parametrize("value", [b"x", {1}, object()])
def test_what_yaml_has_no_plain_form_of_is_not_written(value: object) -> None:
    for write in (dump_yaml, as_yaml):
        with pytest.raises(TypeError, match="represent"):
            write([value])


def test_there_is_no_other_reader_of_yaml() -> None:
    rooms = ("bigbatch", "comm", "trainer", "launch", "benchmarks", "examples")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    found = [str(path.relative_to(ROOT)) for path in files if READS.search(path.read_text())]
    assert found == ["trainer/config/strict_yaml.py"]
