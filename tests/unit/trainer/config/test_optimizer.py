"""Settings of the optimizer that contradict each other are refused, and each remedy is legal."""

import pytest

from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.sections import OPTIMIZERS
from tests.unit.trainer.config.test_schema import make_config, refusal

NULLS = {f"optimizer.{key}": None for key in ("momentum", "nesterov", "trust_coefficient", "momentum_form", "eps")}
ADAMW = {**NULLS, "optimizer.name": "adamw", "optimizer.betas": (0.9, 0.999), "optimizer.eps": 1e-8}
SGD = {**NULLS, "optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.nesterov": True}
FOREIGN = {**NULLS, "optimizer.name": "schedulefree.SGDScheduleFree"}


@pytest.mark.parametrize("changes", [ADAMW, {**ADAMW, "optimizer.name": "lamb"}, SGD, FOREIGN])
def test_each_optimizer_has_a_config(changes: dict[str, object]) -> None:
    assert make_config(changes).optimizer.name == changes["optimizer.name"]


@pytest.mark.parametrize(("name", "nearest"), [("lasr", "lars"), ("LAMB", "lamb"), ("adam", "adamw"), ("", "lars")])
def test_an_unknown_name_gets_the_nearest(name: str, nearest: str) -> None:
    message = refusal({"optimizer.name": name})
    assert message.startswith(f"optimizer.name={name} is none of {', '.join(OPTIMIZERS)}; the nearest is ")
    if name:
        assert f"the nearest is {nearest}. " in message
    assert "schedulefree.SGDScheduleFree" in message


@pytest.mark.parametrize("name", [".", "schedulefree.", ".SGD", "a..b", "a b.c", "./lars"])
def test_a_dot_alone_makes_no_dotted_name(name: str) -> None:
    assert refusal({**FOREIGN, "optimizer.name": name}) == (
        f"optimizer.name={name} is no dotted name of a class: schedulefree.SGDScheduleFree is one"
    )


def test_options_are_those_of_foreign_optimizers() -> None:
    assert refusal({"optimizer.options": {"r": 1}}) == (
        "optimizer.options={'r': 1} has no meaning with optimizer.name=lars: set it to null"
    )
    make_config({**FOREIGN, "optimizer.options": {"r": 1}})


@pytest.mark.parametrize(("argument", "key"), [("lr", "schedule.base_lr"), ("weight_decay", "optimizer.weight_decay")])
def test_options_say_nothing_that_other_keys_say(argument: str, key: str) -> None:
    message = refusal({**FOREIGN, "optimizer.options": {argument: 0.1}})
    assert message == f"optimizer.options must not give {argument}: {key} does"


@pytest.mark.parametrize("fused", [True, False])
def test_torchs_fused_kernels_are_not_taken_by_dotted_names(fused: bool) -> None:
    message = refusal({**FOREIGN, "optimizer.name": "torch.optim.SGD", "optimizer.options": {"fused": fused}})
    assert message.startswith("optimizer.options must not give fused: where a first update is skipped, ")
    assert message.endswith(f"memory that nobody wrote. Leave it out, or take one of {', '.join(OPTIMIZERS)}")


def test_foreign_optimizers_are_not_sharded() -> None:
    message = refusal({**FOREIGN, "optimizer.sharded": True})
    assert message.startswith("optimizer.sharded=True does not go with optimizer.name=schedulefree.SGDScheduleFree, ")
    make_config({**SGD, "optimizer.sharded": True})


@pytest.mark.parametrize(
    "changes",
    [{"comm.wire_dtype": "float16"}, {"optimizer.ema_decay": 0.99, "optimizer.ema_every_steps": 1}],
)
def test_what_a_sharded_update_does_not_do(changes: dict[str, object]) -> None:
    key, value = next(iter(changes.items()))
    assert refusal({**changes, "optimizer.sharded": True}).startswith(f"{key}={value} does not go with optimizer.sh")
    make_config(changes)
    make_config({"optimizer.sharded": True})


def test_nesterov_looks_ahead_along_a_momentum() -> None:
    for changes in (SGD, {"optimizer.nesterov": True}):
        assert refusal({**changes, "optimizer.momentum": 0.0}) == (
            "optimizer.nesterov=True has no meaning with optimizer.momentum=0: set it to false"
        )
        make_config({**changes, "optimizer.momentum": 0.0, "optimizer.nesterov": False})


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_a_gradient_that_is_zero_is_not_divided_by_zero(name: str) -> None:
    changes = {**ADAMW, "optimizer.name": name, "optimizer.eps": 0.0}
    message = refusal(changes)
    assert message == f"optimizer.name={name} needs an optimizer.eps above 0: give a value, 1e-6 is usual"
    assert "0.0" not in message  # nobody need have stated the default
    make_config({**changes, "optimizer.eps": 1e-6})


def test_options_go_through_a_command_line_and_a_file(tmp_path) -> None:
    words = [
        "--optimizer.name=schedulefree.SGDScheduleFree",
        *(f"--{key}=null" for key in NULLS),
        '--optimizer.options={"momentum": 0.8, "warmup_steps": 3, "betas": [0.9, 0.95]}',
    ]
    config = load_config(["--config", "quickstart", *words])
    assert config.optimizer.options == {"momentum": 0.8, "warmup_steps": 3, "betas": [0.9, 0.95]}
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    assert load_config(["--config", str(tmp_path / "saved.yaml")]) == config
