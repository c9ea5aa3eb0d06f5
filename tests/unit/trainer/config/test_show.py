"""`bigbatch config`: what it prints is the experiment, and where its values come from."""

import subprocess
import sys

import pytest
import yaml

from bigbatch import cli
from bigbatch.trainer.config.file import dump_config, load_config, packaged_configs
from bigbatch.trainer.config.schema import KEYS


def test_config_show_prints_what_loads(capsys, tmp_path):
    words = ["imagenet/resnet50_8k", "--run.directory", "a # b", "--data.train_sizes=[[0, 128], [4, 160]]"]
    assert cli.main(["config", "show", *words]) == 0
    text = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(text)
    shown = load_config(["--config", str(tmp_path / "shown.yaml")])
    assert shown == load_config(["--config", *words])
    lines = {line.split(":")[0].strip(): line.rpartition(" # ")[2] for line in text.splitlines() if " # " in line}
    assert lines["directory"] == lines["train_sizes"] == "command line"
    assert lines["global_batch_size"] == "recipe imagenet/resnet50_8k.yaml"
    assert lines["target_top1"] == "base bases/mlperf.yaml"
    assert lines["num_threads"] == "base bases/imagenet.yaml"
    assert lines["virtual_ranks"] == "default"
    assert len(lines) == len(KEYS) - 4  # three sections have a name and options


@pytest.mark.parametrize(
    "words",
    [
        ["--run.epochs", "2", "quickstart"],
        ["--run.epochs=2", "quickstart"],
        ["quickstart", "--run.epochs", "2"],
        ["--config", "quickstart", "--run.epochs", "2"],
        ["--run.epochs=2", "--config=quickstart"],
        ["--virtual-ranks", "2", "quickstart", "--run.epochs", "2"],
    ],
)
def test_config_show_takes_options_before_the_name(words, capsys):
    assert cli.main(["config", "show", *words]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["run"]["epochs"], shown["batch"]["virtual_ranks"]) == (2, 2 if "--virtual-ranks" in words else None)


def test_config_show_calls_a_name_that_is_none_by_what_the_usage_calls_it(capsys):
    assert cli.main(["config", "show", "quikstart"]) == 1
    message = capsys.readouterr().err
    assert "NAME 'quikstart'" in message
    assert "quickstart" in message
    with pytest.raises(SystemExit):
        cli.main(["config", "show", "--run.epochs", "2"])
    assert "required: NAME" in capsys.readouterr().err


def test_config_show_takes_a_run_folder(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(dump_config(load_config(["--config", "quickstart", "--run.epochs=5"])))
    assert cli.main(["config", "show", str(tmp_path)]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["run"]["epochs"] == 5


def test_config_diff_of_two_recipes(capsys):
    assert cli.main(["config", "diff", "imagenet/nus_resnet50_4k", "imagenet/nus_resnet50_8k"]) == 0
    table = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert table["batch.global_batch_size"] == [
        *("4096", "(recipe", "imagenet/nus_resnet50_4k.yaml)"),
        *("8192", "(recipe", "imagenet/nus_resnet50_8k.yaml)"),
    ]
    assert set(table) - {"key"} == {
        "run.directory",
        "run.checkpoint_every_steps",
        "run.divergence_steps",
        "batch.global_batch_size",
        "schedule.base_lr",
        "schedule.warmup_epochs",
    }


def test_config_diff_of_equals(capsys):
    assert cli.main(["config", "diff", "quickstart", "quickstart"]) == 0
    assert capsys.readouterr().out == "quickstart and quickstart are equal\n"


def test_config_list_has_all_packaged_ones(capsys):
    assert cli.main(["config", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == packaged_configs()
    assert all(len(line.split()) > 4 for line in lines)


def test_config_commands_answer_without_torch():
    calls = "; ".join(
        f"main({['config', *words.split()]})" for words in ("show quickstart", "diff quickstart cifar10", "list")
    )
    script = f"import sys; from bigbatch.cli import main; {calls}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, timeout=60)
