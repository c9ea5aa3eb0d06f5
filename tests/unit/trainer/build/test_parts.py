"""From a config to the objects of a run: what does not fit together is refused, and nothing is read in vain."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from PIL import Image

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.connection import Connection
from bigbatch.comm.gradients import group_gather
from bigbatch.comm.gradients.exposed_time import ExposedTime
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import ConfigError, DataError
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build import job as build_job
from bigbatch.trainer.build import parts as build_parts
from bigbatch.trainer.build.job import join_job, without_choices
from bigbatch.trainer.build.model import make_model
from bigbatch.trainer.build.parts import make_parts, make_precision
from bigbatch.trainer.build.plan import make_plan, make_schedule_of
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.input.loaders import resident
from bigbatch.trainer.machine import host
from bigbatch.trainer.models.norm import GhostBatchNorm2d
from bigbatch.trainer.models.resnet import BlurConv2d
from bigbatch.trainer.optim import divided_work
from bigbatch.trainer.report.summary import replayed
from bigbatch.trainer.step import sharded


def one_rank() -> Communicator:
    return connect(env=ALONE, backend="gloo")


def cifar10(root: Path, *others: str) -> Config:
    words = ["data.num_classes=2", "batch.global_batch_size=4", "batch.microbatch_size=4", "batch.bn_span=4", *others]
    return load_config(["--config", "cifar10", f"--data.root={root}", *(f"--{word}" for word in words)])


def write_images(root: Path) -> None:
    for split in ("train", "val"):
        for name in ("a", "b"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (32, 32)).save(folder / f"{number}.png")


def test_make_eval_split_opens_no_training_image(tmp_path: Path) -> None:
    write_images(tmp_path)
    (tmp_path / "train" / "a" / "0.png").write_text("no image")
    config, communicator = cifar10(tmp_path), one_rank()
    split = build_input.make_eval_split(config, communicator)
    batches = list(build_input.eval_batches(config, communicator, split))
    assert sum(int(batch.valid_B.sum()) for batch in batches) == split.num_samples == 6
    with pytest.raises(DataError, match=r"train/a/0\.png"):
        build_input.make_splits(config, communicator)


def test_make_eval_split_lists_no_training_image_and_needs_none(tmp_path: Path) -> None:
    write_images(tmp_path)
    for image in (tmp_path / "train").glob("*/*.png"):
        image.unlink()  # the classes stay
    config, communicator = cifar10(tmp_path), one_rank()
    assert build_input.make_eval_split(config, communicator).num_samples == 6
    (tmp_path / "train" / "c").mkdir()
    with pytest.raises(DataError, match=naming(tmp_path / "val", ": c;")):
        build_input.make_eval_split(config, communicator)
    shutil.rmtree(tmp_path / "train")
    assert build_input.make_eval_split(config, communicator).num_samples == 6
    shutil.rmtree(tmp_path / "val" / "b")
    with pytest.raises(ConfigError, match=naming("data.num_classes=2", tmp_path, "1 class")):
        build_input.make_eval_split(config, communicator)


def test_make_eval_split_takes_packed_data_by_what_it_states(tmp_path: Path) -> None:
    write_images(tmp_path / "set")
    pack(tmp_path / "set", tmp_path / "packed", recipe=PackRecipe())
    config = cifar10(tmp_path / "packed")
    (tmp_path / "packed/train/index.npy").unlink()  # which a training run wants
    assert build_input.make_eval_split(config, one_rank()).num_samples == 6
    with pytest.raises(DataError, match=r"index\.npy"):
        build_input.make_splits(config, one_rank())


@pytest.mark.slow
def test_digests_are_of_classes_and_labels_and_ranks_agree_on_sizes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed copies count as the same. A new name within its class goes unseen: names are not in what is packed."""
    write_images(tmp_path / "set")
    pack(tmp_path / "set", tmp_path / "packed", recipe=PackRecipe())
    pack(tmp_path / "set", tmp_path / "smaller", recipe=PackRecipe(max_side=16))
    for name in ("renamed image", "renamed class", "moved", "relabelled", "added", "removed"):
        shutil.copytree(tmp_path / "set", tmp_path / name)
    for split in ("train", "val"):
        (tmp_path / "renamed class" / split / "b").rename(tmp_path / "renamed class" / split / "c")
    (tmp_path / "renamed image/train/a/0.png").rename(tmp_path / "renamed image/train/a/9.png")
    (tmp_path / "moved/train/a/0.png").rename(tmp_path / "moved/train/b/9.png")
    (tmp_path / "relabelled/val/a/0.png").rename(tmp_path / "relabelled/val/b/9.png")
    (tmp_path / "removed/train/a/0.png").unlink()
    shutil.copy(tmp_path / "added/train/a/0.png", tmp_path / "added/train/a/9.png")
    said: list[str] = []
    monkeypatch.setattr(Connection, "agree", lambda self, what, text: said.append(text))
    digests, texts = {}, {}
    unused: Any = None
    for folder in tmp_path.iterdir():
        images = build_input.list_images(cifar10(folder), one_rank().connection)
        assert images is not None
        digests[folder.name] = build_input.Split(6, unused, images[0]).digest
        texts[folder.name] = said[-1]
    assert len({digests[name] for name in ("set", "packed", "smaller", "renamed image", "relabelled")}) == 1
    assert len(set(digests.values())) == 5
    assert None not in digests.values()
    assert texts["set"] == texts["renamed image"]
    assert len(set(texts.values())) == len(texts) - 1
    assert texts["set"].startswith("6 training images (")
    halves = [texts[name].split(", ") for name in ("set", "relabelled")]
    assert halves[0][0] == halves[1][0]
    assert halves[0][1] != halves[1][1]


@pytest.mark.parametrize(("decay", "num_decaying"), [("4.5", 36), ("null", 176)])
def test_make_schedule_may_end_its_decay_before_the_run(decay: str, num_decaying: int, tmp_path: Path) -> None:
    """24 epochs of 8 steps, with 2 epochs of warm-up; then a straight line down, and end_lr from there on."""
    config = cifar10(tmp_path)
    line = {"name": "polynomial", "base_lr": 0.5, "warmup_epochs": 2.0, "end_lr": 0.1, "options": {"power": 1.0}}
    decay_epochs = None if decay == "null" else float(decay)
    config = replace(config, schedule=replace(config.schedule, **line, decay_epochs=decay_epochs))
    plan = make_plan(config, one_rank(), num_samples=32, first_step=0)
    schedule = make_schedule_of(config, plan)
    rates = [schedule(step) for step in range(24 * 8)]
    expected = [0.5 * (step + 1) / 16 for step in range(16)]
    expected += [0.5 - 0.4 * (step + 1) / num_decaying for step in range(num_decaying)]
    expected += [0.1] * (24 * 8 - len(expected))
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "num_samples", "first_step", "refused"),
    [
        ([], 255, 0, ("batch.global_batch_size=256 ", " 255 ")),
        ([], 2048, 193, ("run.epochs=24 ", "step 192", "step 193", " 25", "run.directory")),
        (["optimizer.ema_decay=0.9", "optimizer.ema_every_steps=192"], 2048, 0, ()),
        (["optimizer.ema_decay=0.9", "optimizer.ema_every_steps=193"], 2048, 0, ("ema_every_steps=193 ", " 192")),
        (["run.divergence_steps=1000"], 2048, 0, ()),  # a recipe's, in a run of an epoch to try it
    ],
)
def test_make_plan_refuses_a_run_without_a_step_and_what_would_begin_after_it(
    words: list[str], num_samples: int, first_step: int, refused: tuple[str, ...]
) -> None:
    """24 epochs of 8 steps."""
    config = quickstart("run.epochs=24", "batch.global_batch_size=256", *words)
    with pytest.raises(ConfigError, match=naming(*refused)) if refused else nullcontext():
        make_plan(config, one_rank(), num_samples=num_samples, first_step=first_step)


@pytest.mark.parametrize(("clip_norm", "moved"), [("0.5", 0.5), ("null", 5.0)])
def test_make_parts_clips_gradients_to_what_the_config_states(clip_norm: str, moved: float) -> None:
    """A gradient of (3, 4), and a step of plain SGD with a learning rate of 1."""
    model = torch.nn.Linear(2, 1, bias=False)
    precision = make_precision(quickstart(f"optimizer.clip_norm={clip_norm}"), model, device=torch.device("cpu"))
    before = model.weight.detach().clone()
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    precision.update_(torch.optim.SGD(precision.masters.values(), lr=1.0))
    assert float((model.weight.detach() - before).norm()) == pytest.approx(moved, rel=1e-5)


def quickstart(*words: str) -> Config:
    return load_config(["--config", "quickstart", "--model.options.width=2", *(f"--{word}" for word in words)])


@pytest.mark.parametrize(
    ("words", "hides"),
    [
        ([], True),
        (["compute.compile=default"], False),
        (["compute.cuda_graph=true"], False),
        (["model.name=torchvision:resnet18"], False),
    ],
)
def test_sharded_update_gathers_weights_behind_the_next_forward_where_that_can_wait(
    words: list[str], hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(["--config", "quickstart", "--optimizer.sharded=true", *(f"--{word}" for word in words)])
    asked: list[bool] = []
    monkeypatch.setattr(sharded, "shard_update", lambda *_, behind_forward, **__: asked.append(behind_forward))
    unused: Any = None
    build_parts._make_optimizer(config, unused, unused, reducer=unused, communicator=unused)
    assert asked == [hides]


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("name", ["muon", "shampoo"])
def test_ranks_share_out_the_work_on_matrices(
    name: str, is_sharded: bool, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself where bits must not depend on which others a rank has."""
    words = [f"optimizer.name={name}", f"optimizer.sharded={is_sharded}", "optimizer.options.nesterov=true"]
    words += ["schedule.end_lr=0", f"run.reproducible={is_exact}"]
    config = load_config(["--config", "quickstart", *(f"--{word}" for word in words)])
    monkeypatch.setattr(divided_work, "DividedWork", lambda communicator, *, one_by_one: (communicator, one_by_one))
    monkeypatch.setattr(
        sharded, "shard_update", lambda *_, make_optimizer, **__: make_optimizer(dict(model.named_parameters()))
    )
    model, ranks = torch.nn.Linear(3, 2), one_rank()
    weights: Any = SimpleNamespace(masters=dict(model.named_parameters()))
    unused: Any = None
    made: Any = build_parts._make_optimizer(config, model, weights, reducer=unused, communicator=ranks)
    assert made.divide == (ranks, is_exact)


def test_images_of_the_former_run_are_not_listed_again(tmp_path: Path) -> None:
    write_images(tmp_path)
    config = cifar10(tmp_path)
    former = build_input.list_images(config, one_rank().connection)
    shutil.copy(tmp_path / "train/a/0.png", tmp_path / "train/a/9.png")
    assert build_input.make_splits(config, one_rank(), listed=former).images == former


@pytest.mark.parametrize("where", ["device", "host"])
def test_resident_images_lie_where_the_config_states(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path)
    made: list[str | None] = []
    monkeypatch.setattr(resident, "ResidentLoader", lambda setup: made.append(setup.data.resident_on))
    config = cifar10(tmp_path, f"data.resident_on={where}")
    build_input.make_splits(config, one_rank())
    assert made == [where] * 2


@pytest.mark.parametrize("zero_gamma", [True, False])
@pytest.mark.parametrize("blurpool", [True, False])
def test_options_of_the_resnets_reach_them(zero_gamma: bool, blurpool: bool) -> None:
    words = ["model.name=resnet18"]
    words += [f"model.options.zero_gamma={zero_gamma}", f"model.options.blurpool={blurpool}"]
    config = load_config(["--config", "quickstart", *(f"--{word}" for word in words)])
    model = make_model(config, one_rank())
    scales = [block.bn2.weight for stage in (model.layer1, model.layer4) for block in stage]  # type: ignore[union-attr]
    assert [bool(scale.any()) for scale in scales] == [not zero_gamma] * 4
    assert sum(isinstance(module, BlurConv2d) for module in model.modules()) == (6 if blurpool else 0)


def test_generated_images_are_as_many_as_imagenet_has_unless_stated() -> None:
    """A recipe of 64K is then tried without ImageNet, by one further key."""
    for words, counts in (((), [1_281_167, 50_000]), (("data.num_synthetic_samples=1024",), [1024, 1024])):
        splits = build_input.make_splits(quickstart("data.loader=synthetic", *words), one_rank())
        assert [splits.train.num_samples, splits.val.num_samples] == counts


def test_generated_samples_have_no_digest() -> None:
    config = quickstart("data.loader=synthetic", "data.num_synthetic_samples=1024")
    assert build_input.make_splits(config, one_rank()).train.digest is None


def test_momentum_of_a_run_mirrors_its_rate_where_the_config_says_so() -> None:
    """At its highest rate, after the warm-up, it is the lowest."""
    config, communicator = quickstart("schedule.low_momentum=0.5", "schedule.warmup_epochs=1"), one_rank()
    plan = make_plan(config, communicator, num_samples=5120, first_step=0)
    parts = make_parts(config, communicator, plan=plan, tuned=None)
    parts.set_lr_(step=plan.steps_per_epoch - 1)
    assert [group["momentum"] for group in parts.optimizer.param_groups] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("is_reproducible", [False, True])
def test_join_job_connects_a_reproducible_run_before_torch_is_deterministic(
    is_reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch gives process groups that are made later no NVLS; a caller's own choice stays."""
    seen: list[bool] = []

    def connect_and_note(**settings: Any) -> Communicator:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return connect(**settings)

    monkeypatch.setattr(build_job, "connect", connect_and_note)
    monkeypatch.setattr(host, "keep_freed_memory", lambda: None)
    before = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    try:
        join_job(quickstart(f"run.reproducible={is_reproducible}"), ALONE)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)
    assert seen == [not is_reproducible]


def test_join_job_refuses_a_gpu_without_bf16_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_job, "choose_device", lambda env, *, backend: torch.device("cuda", 0))
    monkeypatch.setattr(build_job, "connect", lambda **settings: pytest.fail("ranks met"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ConfigError, match=naming("optimizer.precision=bf16 ", "Tesla T4", "7.5", " fp32")):
        join_job(quickstart("optimizer.precision=bf16"), ALONE)


def test_without_choices_keeps_the_wire_and_leaves_no_ranks_to_replay_or_to_share_with() -> None:
    """Any number of ranks evaluates a run whose ranks shared ghost batches, or stood for others."""
    comm = without_choices(quickstart("comm.wire_dtype=bfloat16"), world_size=2).comm
    assert (comm.wire_dtype, comm.algorithm) == ("bfloat16", "native")
    config = quickstart("batch.microbatch_size=64", "batch.bn_span=128", "batch.virtual_ranks=4")
    for world_size in (1, 3):
        batch = without_choices(config, world_size=world_size).batch
        assert accumulation_steps(batch, world_size=world_size) == 1
        assert (batch.bn_span, batch.virtual_ranks) == (64, None)
    narrow = without_choices(quickstart("batch.bn_span=32"), world_size=3).batch
    assert narrow.bn_span == 32


@pytest.mark.parametrize(
    ("precision", "microbatch_size", "num_sums"), [("fp16", 64, 1), ("fp16", 256, 0), ("fp32", 64, 0)]
)
def test_gradients_are_added_in_fp32_where_there_are_several_of_half_precision(
    precision: str, microbatch_size: int, num_sums: int
) -> None:
    words = ["optimizer.loss_scale=1024", "optimizer.loss_scale_growth_steps=1000"] if precision == "fp16" else []
    batch = ["batch.global_batch_size=256", f"batch.microbatch_size={microbatch_size}", "batch.bn_span=64"]
    config, communicator = quickstart(f"optimizer.precision={precision}", *batch, *words), one_rank()
    plan = make_plan(config, communicator, num_samples=5000, first_step=0)
    parts = make_parts(config, communicator, plan=plan, tuned=None)
    half = [p for p in parts.model.parameters() if p.dtype == torch.float16]
    assert len(parts.accumulation._sums if parts.accumulation else ()) == num_sums * len(half)


def test_norm_layers_share_ghost_batches_with_the_neighbouring_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of 4 ranks, two to a ghost batch; their waits count with those for gradients."""
    made: list[dict[str, object]] = []
    monkeypatch.setattr(group_gather, "make_group_gather", lambda transport, **facts: made.append(facts))
    config = quickstart("batch.global_batch_size=256", "batch.microbatch_size=64", "batch.bn_span=128")
    four = SimpleNamespace(transport=None, device=torch.device("cpu"))
    exposed = ExposedTime()
    norms = [m for m in make_model(config, four, exposed=exposed).modules() if isinstance(m, GhostBatchNorm2d)]
    assert made == [{"group_size": 2, "exposed": exposed, "what": "batch-norm statistics"}], "one group for all layers"
    assert {(norm.bn_span, norm.part_size, norm.ghosts_per_step) for norm in norms} == {(128, 64, 1)}


@pytest.mark.parametrize(
    ("virtual_ranks", "world_size", "line"),
    [
        (2048, 1, "replays the updates of 2048 ranks: 1 here, each does the work of 2048"),
        (8, 2, "replays the updates of 8 ranks: 2 here, each does the work of 4"),
        (8, 3, "replays the updates of 8 ranks: 3 here"),
    ],
)
def test_run_says_whose_updates_it_replays(virtual_ranks: int, world_size: int, line: str) -> None:
    assert replayed(virtual_ranks, world_size=world_size) == line
