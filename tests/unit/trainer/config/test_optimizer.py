"""Settings of the optimizer that contradict each other are refused, and each remedy is legal."""

import re

import pytest
from error_texts import naming

from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.sections import OPTIMIZERS
from tests.unit.trainer.config.test_schema import make_config, refusal

NULLS = {f"optimizer.{key}": None for key in ("momentum", "nesterov", "trust_coefficient", "momentum_form", "eps")}
ADAMW = {**NULLS, "optimizer.name": "adamw", "optimizer.betas": (0.9, 0.999), "optimizer.eps": 1e-8}
SGD = {**NULLS, "optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.nesterov": True}
MUON = {
    **NULLS,
    "optimizer.name": "muon",
    "optimizer.momentum": 0.95,
    "optimizer.nesterov": True,
    "optimizer.options.vector_lr_factor": 1.0,
    "optimizer.options.newton_schulz_steps": 5,
    "optimizer.options.newton_schulz_precision": "fp32",
}
SHAMPOO = {
    **SGD,
    "optimizer.name": "shampoo",
    "optimizer.eps": 1e-6,
    "optimizer.options.block_size": 512,
    "optimizer.options.root_every_steps": 20,
    "optimizer.options.factor_decay": 0.9,
}
FOREIGN = {**NULLS, "optimizer.name": "schedulefree.SGDScheduleFree"}


@pytest.mark.parametrize("changes", [ADAMW, {**ADAMW, "optimizer.name": "lamb"}, SGD, MUON, SHAMPOO, FOREIGN])
def test_optimizer_config_of_each_name(changes: dict[str, object]) -> None:
    assert make_config(changes).optimizer.name == changes["optimizer.name"]


@pytest.mark.parametrize(("name", "nearest"), [("lasr", "lars"), ("LAMB", "lamb"), ("adam", "adamw")])
def test_optimizer_name_that_is_unknown_gets_the_nearest(name: str, nearest: str) -> None:
    message = refusal({"optimizer.name": name})
    assert message.startswith(f"optimizer.name={name} ")
    assert f" {', '.join(OPTIMIZERS)};" in message
    if name:
        assert f" {nearest}. " in message
    assert "schedulefree.SGDScheduleFree" in message


@pytest.mark.parametrize("name", [".", "schedulefree.", ".SGD", "a..b", "a b.c", "./lars"])
def test_optimizer_name_is_not_dotted_by_a_dot_alone(name: str) -> None:
    message = refusal({**FOREIGN, "optimizer.name": name})
    assert message.startswith(f"optimizer.name={name} ")
    assert "schedulefree.SGDScheduleFree" in message


@pytest.mark.parametrize(("argument", "key"), [("lr", "schedule.base_lr"), ("weight_decay", "optimizer.weight_decay")])
def test_optimizer_options_say_nothing_that_other_keys_say(argument: str, key: str) -> None:
    message = refusal({**FOREIGN, "optimizer.options": {argument: 0.1}})
    assert re.search(naming("optimizer.options ", f" {argument}: ", f" {key} "), message)


@pytest.mark.parametrize("fused", [True, False])
def test_optimizer_options_take_none_of_torchs_fused_kernels(fused: bool) -> None:
    message = refusal({**FOREIGN, "optimizer.name": "torch.optim.SGD", "optimizer.options": {"fused": fused}})
    assert re.search(naming("optimizer.options ", " fused: "), message)
    assert message.endswith(f" {', '.join(OPTIMIZERS)}")


def test_sharded_refuses_foreign_optimizers() -> None:
    message = refusal({**FOREIGN, "optimizer.sharded": True})
    assert re.search(naming("optimizer.sharded=True ", "optimizer.name=schedulefree.SGDScheduleFree"), message)
    for changes in (SGD, MUON, SHAMPOO):
        make_config({**changes, "optimizer.sharded": True})


def test_shampoo_has_a_floor_and_is_not_captured() -> None:
    assert re.search(
        naming("optimizer.name=shampoo ", "optimizer.eps ", "1e-6"), refusal({**SHAMPOO, "optimizer.eps": 0.0})
    )
    message = refusal({**SHAMPOO, "compute.cuda_graph": True})
    assert re.search(naming("compute.cuda_graph=True ", "optimizer.name=shampoo", "false"), message)


def test_cuda_graph_refuses_symmetric_buffers_whose_replayed_sums_were_wrong() -> None:
    message = refusal({"compute.cuda_graph": True, "comm.buffers": "symmetric"})
    assert re.search(naming("comm.buffers=symmetric", "compute.cuda_graph=True", "comm.buffers to registered"), message)


@pytest.mark.parametrize(
    "changes",
    [{"comm.wire_dtype": "float16"}, {"optimizer.ema_decay": 0.99, "optimizer.ema_every_steps": 1}],
)
def test_sharded_refuses_what_it_does_not_do(changes: dict[str, object]) -> None:
    key, value = next(iter(changes.items()))
    assert re.search(naming(f"{key}={value} ", "optimizer.sharded"), refusal({**changes, "optimizer.sharded": True}))
    make_config(changes)
    make_config({"optimizer.sharded": True})


def test_nesterov_looks_ahead_along_a_momentum() -> None:
    for changes in (SGD, {"optimizer.nesterov": True}):
        named = naming("optimizer.nesterov=True ", "optimizer.momentum=0", "false")
        assert re.search(named, refusal({**changes, "optimizer.momentum": 0.0}))
        make_config({**changes, "optimizer.momentum": 0.0, "optimizer.nesterov": False})


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_eps_does_not_let_a_zero_gradient_be_divided_by_zero(name: str) -> None:
    changes = {**ADAMW, "optimizer.name": name, "optimizer.eps": 0.0}
    message = refusal(changes)
    assert re.search(naming(f"optimizer.name={name} ", "optimizer.eps", "1e-6"), message)
    assert "0.0" not in message  # nobody need have stated the default
    make_config({**changes, "optimizer.eps": 1e-6})


def test_optimizer_options_go_through_a_command_line_and_a_file(tmp_path) -> None:
    words = [
        "--optimizer.name=schedulefree.SGDScheduleFree",
        '--optimizer.options={"momentum": 0.8, "warmup_steps": 3, "betas": [0.9, 0.95]}',
    ]
    config = load_config(["--config", "quickstart", *words])
    assert config.optimizer.options == {"momentum": 0.8, "warmup_steps": 3, "betas": [0.9, 0.95]}
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    assert load_config(["--config", str(tmp_path / "saved.yaml")]) == config


@pytest.mark.parametrize("factor", [0, -1, True, "fast", None, float("inf"), float("nan")])
def test_optimizer_lr_factors_are_positive_numbers(factor: object) -> None:
    message = refusal({"optimizer.lr_factors": {"fc.*": 1, "*": factor}})
    assert re.search(naming("optimizer.lr_factors", "'*'", repr(factor)), message)
    make_config({"optimizer.lr_factors": {"fc.*": 1, "*": 0.1}})


def test_model_partial_weights_need_weights_and_a_list() -> None:
    some = {"model.weights": "a.pth", "model.partial_weights": ("conv1.*",)}
    make_config(some)
    assert re.search(naming("model.partial_weights", "model.weights"), refusal({"model.partial_weights": ("a",)}))
    assert re.search(
        naming("model.new_head=True", "model.partial_weights", "false"), refusal({**some, "model.new_head": True})
    )
    assert re.search(naming("model.partial_weights=[]", "null"), refusal({**some, "model.partial_weights": ()}))


@pytest.mark.parametrize("start", [{"model.init": "fan_in"}, {"model.linear_std": 0.01}])
def test_model_init_needs_layers_that_weights_do_not_start(start: dict[str, object]) -> None:
    weights = {"model.weights": "a.pth"}
    make_config(start)
    make_config({**start, **weights, "model.new_head": True})
    make_config({**start, **weights, "model.partial_weights": ("conv1.*",)})
    assert re.search(naming(*start, "model.weights", "null"), refusal({**start, **weights}))


def test_model_new_head_needs_weights() -> None:
    assert re.search(naming("model.new_head=True", "model.weights", "false"), refusal({"model.new_head": True}))
    make_config({"model.new_head": True, "model.weights": "a.pth"})
