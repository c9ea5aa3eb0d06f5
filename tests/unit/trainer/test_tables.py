"""The names that a config may state, and the tables that load them, are the same: a name in one alone would be lost."""

from typing import get_args

from bigbatch.trainer.build.input import LOADERS
from bigbatch.trainer.build.plan import SCHEDULES
from bigbatch.trainer.config import sections
from bigbatch.trainer.config.schema import KEYS
from bigbatch.trainer.models import MODELS
from bigbatch.trainer.observe import observer
from bigbatch.trainer.recovery import RECOVERIES


def test_tables_have_the_names_that_a_config_may_state() -> None:
    assert set(LOADERS) | {"synthetic"} == set(sections.LOADERS)
    assert set(SCHEDULES) == set(sections.SCHEDULES)
    assert set(MODELS) == set(sections.MODELS)
    assert set(RECOVERIES) == set(get_args(KEYS["run.heal"].kind))


def test_every_observer_is_asked_for_by_a_key_of_the_config() -> None:
    assert tuple(observer.OBSERVERS) == observer.KEYS
    assert set(observer.KEYS) <= set(KEYS)
    assert {*observer.CHECKS, *observer.OF_SEVERAL_RANKS} <= set(observer.KEYS)
