"""Which settings of the loggers go together."""

import pytest
from error_texts import naming

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.file import load_config


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--run.loggers=[wandb,wandb]"], ("run.loggers", "wandb", "twice")),
        (["--run.loggers=[mlflow]"], ("run.loggers", "mlflow", "'tensorboard', 'wandb'")),
        (["--run.wandb_options={project: p}"], ("run.wandb_options", "WANDB_PROJECT")),
    ],
)
def test_settings_of_loggers_that_say_nothing_are_refused(words: list[str], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=naming(*named)):
        load_config(["--config", "quickstart", *words])
