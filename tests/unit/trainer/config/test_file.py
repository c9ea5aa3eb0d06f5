"""From YAML and command line to a config and back; every refusal is one line that names what to change."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from error_texts import naming

from bigbatch.cli import main
from bigbatch.errors import ConfigError
from bigbatch.trainer.config import file as config_file
from bigbatch.trainer.config import sections as config_sections
from bigbatch.trainer.config.file import dump_config, find_config, flatten, load_config, packaged_configs, resolve
from bigbatch.trainer.config.kinds import OPTION_KEYS, OPTIONS, flat_options
from bigbatch.trainer.config.names import KEY_OF_OTHER_NAME, SET_OUTSIDE_CONFIG
from bigbatch.trainer.config.options import FLAGS
from bigbatch.trainer.config.schema import KEYS, SECTIONS, lookup, with_defaults
from bigbatch.trainer.config.sections import MODE_KEYS

QUICKSTART = config_file.PACKAGED / "quickstart.yaml"
NAMES = {"cifar10", "cifar10_10epochs", "cifar10_24epochs", "cifar10_80epochs", "cifar100", "imagenette", "quickstart"}
"""Packaged experiments besides those of ImageNet, which tests/unit/configs/test_recipes.py lists."""


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def write(tmp_path):
    """Write quickstart with changes ({"section.key": value}) as YAML text of its own, and give the path."""

    def write(changes: dict[str, str]) -> str:
        sections = yaml.safe_load(dump_config(load_config(["--config", "quickstart"])))
        lines = []
        for section, values in sections.items():
            lines.append(f"{section}:")
            for key, value in values.items():
                lines.append(f"  {key}: {changes.get(f'{section}.{key}', json.dumps(value))}")  # JSON is YAML
        path = tmp_path / "experiment.yaml"
        path.write_text("\n".join(lines))
        return str(path)

    return write


@pytest.fixture
def write_text(tmp_path):
    def write_text(text: str | bytes) -> str:
        path = tmp_path / "experiment.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write_text


def test_packaged_configs():
    assert set(packaged_configs()) >= NAMES
    assert packaged_configs() == sorted(packaged_configs())


@pytest.mark.slow
@pytest.mark.parametrize("name", packaged_configs())
def test_load_config_of_a_packaged_one_is_complete_and_comes_back(name, write_text):
    """What the YAML states is what the config holds, key by key, and dump_config writes all keys."""
    config = load_config(["--config", name])
    stated = yaml.safe_load((config_file.PACKAGED / f"{name}.yaml").read_text())
    stated.pop("base", None)
    for key, value in flat_options(flatten(stated)).items():
        assert json.loads(json.dumps(lookup(config, key))) == value, key  # with lists for tuples
    dumped = flatten(yaml.safe_load(dump_config(config)))
    assert tuple(dumped) == tuple(KEYS)
    assert dumped == {key: json.loads(json.dumps(lookup(config, key))) for key in KEYS}
    assert load_config(["--config", write_text(dump_config(config))]) == config


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optimizer.options", {"m": 0.8, "b": [3]}, ["--optimizer.name=a.B", "--optimizer.options={m: 0.8, b: [3]}"]),
        (
            "model.options",
            {"a": None, "b": 1},
            ["--model.name=a.B", "--model.options={a: null}", "--model.options.b=1"],
        ),
        (
            "run.metrics",
            {"b": {"name": "m.G", "options": {"k": 1}}},
            ["--run.metrics={b: {name: m.G, options: {k: 1}}}"],
        ),
    ],
)
def test_dicts_for_other_packages_go_through_a_command_line_and_a_file(key, value, words, write_text):
    config = load_config(["--config", "quickstart", *words])
    assert lookup(config, key) == value
    assert load_config(["--config", write_text(dump_config(config))]) == config


@pytest.mark.parametrize(
    ("key", "text", "shown", "legal"),
    [
        ("run.epochs", "many", "many", "int"),
        ("run.epochs", "2.5", "2.5", "int"),
        ("schedule.base_lr", ".inf", "inf", "3.4e38"),
        ("data.flip", "maybe", "maybe", "bool"),
        ("model.partial_weights", "conv1.*", "conv1.*", "[str, ...] or null"),
        ("data.mean", "[0.5, 0.5]", "[0.5, 0.5]", "[float, float, float]"),
        ("run.directory", "null", "null", "str"),
        ("data.root", "NULL", "null", "str"),
        ("data.crop", "center", "center", "one of 'resized', 'padded'"),
    ],
)
def test_load_config_refuses_a_wrong_type(key, text, shown, legal, write):
    for argv in (("--config", write({key: text})), ("--config", "quickstart", f"--{key}", text)):
        message = refusal(*argv)
        assert message.startswith(f"{key}={shown} ")
        assert message.endswith(f" {legal}")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("run.epohcs", "run.epochs"),
        ("optimiser.momentum", "optimizer.momentum"),
        ("momentum", "optimizer.momentum"),
        ("run.epoch", "run.epochs"),  # no abbreviations
        ("optimizer.lr", "schedule.base_lr"),
        ("batch-size", "batch.global_batch_size"),
    ],
)
def test_load_config_refuses_an_unknown_option(key, nearest):
    for words in ([f"--{key}", "1"], [f"--{key}=1"]):
        message = refusal("--config", "quickstart", *words)
        assert message.startswith("command line: ")
        assert f" {key};" in message
        assert message.endswith(f" {nearest}")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            "--config=quickstart --confg=1",
            "unknown key confg; bigbatch train --help all lists all",
        ),  # --config is given
        ("--config=quickstart --xyzzy=1", "unknown key xyzzy; bigbatch train --help all lists all"),
        ("--confg=quickstart", "unknown key confg; the nearest legal one is config"),  # and it is not missing, too
        ("--config=quickstart --local-rank=0", "bigbatch launch"),
        ("--config=quickstart --test-only=1", "bigbatch evaluate"),
        ("--config=quickstart --grad-accum-steps=2", "batch.microbatch_size"),
        ("--config=quickstart --arch=resnet50", "model.name"),
        ("--config=quickstart --data-dir=x", "data.root"),
        ("--config=quickstart --num_train_epochs=3", "run.epochs"),
        ("--config=quickstart --batch.bn_span=--", "--batch.bn_span=--: give a value after ="),
        ("--config=quickstart --run={epochs:3}", " run;"),  # there is one way to state a key
        ("--config=quickstart extra", "extra is not an option"),
        ("quickstart", "--config quickstart"),
        ("--config=quickstart --run.epochs", " --run.epochs: "),
        ("--run.epochs=3", "--config is missing: name a YAML file or one of cifar10, "),
        ("--config=quickstart --config=cifar10", "--config is given 2 times: keep one, and override its keys by "),
    ],
)
def test_load_config_refuses_a_command_line_and_says_what_was_meant(words, named):
    assert named in refusal(*words.split())


def test_names_of_others_lead_to_keys():
    assert not set(SET_OUTSIDE_CONFIG) & {*KEY_OF_OTHER_NAME, *(key.name for key in KEYS.values())}
    assert set(KEY_OF_OTHER_NAME.values()) <= {*KEYS, *OPTION_KEYS}
    assert not set(KEY_OF_OTHER_NAME) & {key.name for key in KEYS.values()}


@pytest.mark.parametrize(
    "section", ["run", "data", "augment", "model", "batch", "compute", "optimizer", "schedule", "comm"]
)
def test_load_config_from_before_keys_takes_their_defaults(section, write_text):
    sections = yaml.safe_load(dump_config(unchanged := load_config(["--config", "quickstart"])))
    kept = {key.decider for key in KEYS.values()} | {f"{kind}.name" for kind in OPTIONS}
    missing = {f"{section}.{name}" for name in sections[section]} - kept
    for key in missing:
        del sections[section][key.partition(".")[2]]
    config = load_config(["--config", write_text(yaml.safe_dump(sections))])
    stated = tuple(key for key in MODE_KEYS if key not in missing)
    of_a_file = {"run.directory": "runs/experiment", "compute.mode_keeps": stated}
    defaults = with_defaults(flatten(sections)) | of_a_file
    assert {key: lookup(config, key) for key in missing} == {key: defaults[key] for key in missing}
    assert [key for key in KEYS if key not in missing and lookup(config, key) != lookup(unchanged, key)] == []


def test_resolve_of_a_config_that_states_nothing_is_all_defaults(write_text):
    resolved = resolve(["--config", write_text("{}")])
    assert set(resolved.origins.values()) == {"default"}
    assert load_config(["--config", write_text(dump_config(resolved.config))]) == resolved.config


@pytest.mark.parametrize(
    ("content", "named"),
    [
        *((text, "section") for text in (b"", b"- run\n- data\n", b"run: 5\n")),
        *((text, "YAML: ") for text in (b"run: [1, 2\n", b"run: {\n", b"\xff\xfe\xfa", b"a: \x00", b"!!python/none x")),
        (b"[" * 600 + b"]" * 600, "YAML: "),
        (b"run:\n  epochs: 1\n  epochs: 1\n", "YAML: epochs "),
    ],
)
def test_load_config_refuses_what_is_no_mapping_of_sections(content, named, write_text):
    path = write_text(content)
    assert re.search(naming(path, named), refusal("--config", path))


@pytest.mark.parametrize("word", ["2026-13-45", "010", "no", "!!int x", "&a", "[" * 600 + "]" * 600])
def test_load_config_takes_text_as_it_is_written(word):
    assert load_config(["--config", "quickstart", "--run.directory", word]).run.directory == word


def test_load_config_refuses_a_missing_file_and_an_unknown_name(tmp_path):
    missing = str(tmp_path / "none.yaml")
    assert refusal("--config", missing).startswith(f"--config '{missing}': ")
    assert refusal("--config", "quikstart").endswith(" quickstart")
    assert refusal("--config", "resnet50_8k").endswith(" imagenet/resnet50_8k")
    assert str(tmp_path) in refusal("--config", str(tmp_path))  # a folder
    assert refusal("--config", "flowers.yaml").endswith("; bigbatch config list names those")


def test_find_config_lets_no_folder_replace_a_packaged_experiment(monkeypatch, tmp_path):
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart/config.yaml").write_text("run:\n  epochs: 77\n")
    (tmp_path / "mine.yaml").write_text("base: quickstart\n")
    monkeypatch.chdir(tmp_path)
    assert find_config("quickstart") == QUICKSTART
    assert find_config("./quickstart") == Path("quickstart/config.yaml")
    assert load_config(["--config", "mine.yaml"]).run.epochs == load_config(["--config", str(QUICKSTART)]).run.epochs
    (tmp_path / "quickstart/config.yaml").rename("file")
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "file").rename("quickstart")
    assert load_config(["--config", "quickstart"]).run.epochs == 77


@pytest.mark.parametrize("words", [["--config"], ["--config="], ["--config", ""]])
def test_find_config_takes_no_empty_name_for_the_folder_here(words, monkeypatch, tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "mine.yaml").write_text('base: ""\n')
    monkeypatch.chdir(tmp_path)
    assert refusal(*words).startswith("--config '': ")
    assert refusal("--config", "mine.yaml").startswith("mine.yaml: base '': ")
    assert load_config(["--config", "."]) == load_config(["--config", "config.yaml"])


def test_load_config_takes_a_path_that_starts_with_a_dash(monkeypatch, tmp_path):
    (tmp_path / "-mine.yaml").write_text(QUICKSTART.read_text())
    monkeypatch.chdir(tmp_path)
    others = ("--run.directory=runs/x", "--compute.mode_keeps=[]")
    assert load_config(["--config=-mine.yaml", *others]) == load_config(["--config", "quickstart", *others])


def test_help_names_every_key_and_its_docstring(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    pages = {topic: " ".join(help_page(capsys, "--help", topic).split()) for topic in (*SECTIONS, "all")}
    for key in KEYS:
        assert f" --{key} " in pages[key.partition(".")[0]]
    text = " ".join(pages.values())
    docstrings = inspect.getsource(config_sections).split('"""')[3::2]  # [1] is the module's
    assert len(docstrings) == len(KEYS) + 9
    assert all(f" --{option} " in text for option in OPTION_KEYS)
    for docstring in docstrings:
        assert " ".join(docstring.split()).rstrip(".") in text


def help_page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        load_config(words, prog="bigbatch train")
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_fits_on_a_screen_and_shows_a_section_or_a_key(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    first = help_page(capsys, "--help")
    assert help_page(capsys, "quickstart", "--help") == first
    assert len(first.splitlines()) <= 40
    assert max(map(len, first.splitlines())) <= 80
    for words in ("bigbatch train --config NAME_OR_FILE", "--virtual-ranks is short for --batch.virtual_ranks"):
        assert words in first
    assert re.search(r" --data\.root +Folder with ", first)
    counts = {name: int(num) for name, num in re.findall(r"\b(\w+) (\d+)[,\n]", first.split("all keys by section")[1])}
    own = [*KEYS, *OPTION_KEYS]
    assert counts == {section: sum(key.startswith(f"{section}.") for key in own) for section in SECTIONS}
    for topic in ("data", "optimizer.options", "schedule.base_lr", "--run.epochs"):
        shown = re.findall(r"^  --(\S+)$", help_page(capsys, "--help", topic), re.M)
        topic = topic.removeprefix("--")
        assert shown == [key for key in own if key == topic or key.startswith(f"{topic}.")]
    with pytest.raises(ConfigError, match=r"--help dta\.root: .*nearest is data\.root"):
        load_config(["--config", "quickstart", "-h", "dta.root"])


def test_help_alone_reads_sources(capsys, monkeypatch):
    def no_sources(_: object) -> str:
        raise OSError("source code not available")

    monkeypatch.setattr(inspect, "getsource", no_sources)
    load_config(["--config", "quickstart"])
    for word in ("--help", "-h"):
        with pytest.raises(SystemExit) as caught:
            load_config([word, "all"])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert all(f" --{key}\n" in text for key in KEYS)


@pytest.mark.parametrize("words", [["--virtual-ranks", "4"], ["--virtual-ranks=4"]])
def test_virtual_ranks_have_a_short_name(words):
    assert load_config([*words, "--config", "quickstart"]).batch.virtual_ranks == 4
    assert load_config(["--config", "quickstart", *words, "--batch.virtual_ranks=2"]).batch.virtual_ranks == 2


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_train_are_no_part_of_the_experiment_and_no_other_command_takes_them(flag: str) -> None:
    assert load_config(["--config", "quickstart", flag]) == load_config(["--config", "quickstart"])
    with pytest.raises(ConfigError, match=naming(flag.removeprefix("--"))):
        load_config(["--config", "quickstart", flag], prog="bigbatch tune range")


@pytest.mark.parametrize("command", [["train"], ["config", "show"]])
def test_examples_of_the_help_are_taken(command, capsys):
    """None was, where it shortened a run."""
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    shown = (
        capsys.readouterr().out.replace("examples:\n  bigbatch ", "example: bigbatch ").split("example: bigbatch ")[1]
    )
    words = shown.splitlines()[0].split()[len(command) :]
    load_config(words if command == ["train"] else ["--config", *words])


def test_resolve_knows_an_own_file_by_the_name_of_a_packaged_one(monkeypatch, tmp_path):
    """compute.mode=auto keeps what the user states, wherever the file is."""
    monkeypatch.chdir(tmp_path)
    Path("quickstart.yaml").write_text(QUICKSTART.read_text())
    assert load_config(["--config", "quickstart.yaml"]).compute.mode_keeps == ("batch.microbatch_size",)
    assert load_config(["--config", "quickstart"]).compute.mode_keeps == ()


def test_config_is_utf_8_in_any_locale(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_bytes("# \N{LATIN SMALL LETTER U WITH DIAERESIS}\nbase: quickstart\n".encode())
    code = f"from bigbatch.trainer.config.file import load_config; load_config(['--config={path}'])"
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert subprocess.run([sys.executable, "-c", code], env=environ).returncode == 0
