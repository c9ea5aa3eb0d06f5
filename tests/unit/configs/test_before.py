"""Each packaged experiment is what it was as a complete YAML."""

from pathlib import Path

import pytest

from bigbatch.trainer.config.file import dump_config, load_config, packaged_configs

BEFORE = Path(__file__).resolve().parents[2] / "golden/configs_before"


def test_there_is_one_before_of_each() -> None:
    assert packaged_configs() == sorted(str(p.relative_to(BEFORE).with_suffix("")) for p in BEFORE.rglob("*.yaml"))


@pytest.mark.parametrize("name", packaged_configs())
def test_experiment_is_what_it_was(name: str) -> None:
    before, now = (load_config(["--config", each]) for each in (str(BEFORE / f"{name}.yaml"), name))
    assert now == before
    assert dump_config(now) == dump_config(before)
