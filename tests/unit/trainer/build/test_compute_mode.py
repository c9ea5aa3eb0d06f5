"""compute.mode=auto is a rule: its choice for recipes and numbers of GPUs, what it leaves as it is, and its line."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from error_texts import naming
from torch import nn

from bigbatch.cli import main
from bigbatch.errors import ConfigError
from bigbatch.trainer.build.compute import require_capturable
from bigbatch.trainer.build.compute_mode import (
    KEPT_BYTES,
    MEMORY_SHARE,
    ComputeMode,
    choose_as_launched,
    choose_in_job,
    choose_mode,
    describe_mode,
)
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.memory import out_of_memory
from bigbatch.trainer.models import build_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
EIGHTS = ("--batch.global_batch_size=32", "--batch.microbatch_size=8", "--batch.bn_span=8", "--data.image_size=8")
KEEPS_NOTHING = "--compute.mode_keeps=[]"
GB = 10**9


def config_of(*words: str, name: str = "quickstart") -> Config:
    return load_config(["--config", name, *(["--compute.mode=auto"] if name == "quickstart" else []), *words])


def mode_of(config: Config, world_size: int, memory_bytes: int | None = None) -> str:
    return describe_mode(choose_mode(config, world_size=world_size, memory_bytes=memory_bytes).config)


@pytest.mark.parametrize(
    ("name", "num_gpus", "expected"),
    [
        # 8,192 in ghost batches of 64
        ("imagenet/resnet50_8k", 1, "microbatch 256, compiled"),
        ("imagenet/resnet50_8k", 8, "microbatch 256, compiled"),
        ("imagenet/resnet50_8k", 32, "microbatch 256, compiled"),
        ("imagenet/resnet50_8k", 64, "microbatch 128, compiled, CUDA graph"),
        ("imagenet/resnet50_8k", 96, "microbatch 64, compiled, CUDA graph"),  # shares of 128 and 64
        ("imagenet/resnet50_8k", 128, "microbatch 64, compiled, CUDA graph"),
        # 65,536 in ghost batches of 32
        ("imagenet/jia_resnet50_64k", 8, "microbatch 256, compiled"),
        ("imagenet/jia_resnet50_64k", 256, "microbatch 256, compiled"),
        ("imagenet/jia_resnet50_64k", 512, "microbatch 128, compiled, CUDA graph"),
        ("imagenet/jia_resnet50_64k", 2048, "microbatch 32, compiled, CUDA graph"),
    ],
)
def test_compute_mode_of_recipes_on_any_number_of_gpus(name: str, num_gpus: int, expected: str) -> None:
    config = config_of(name=name)
    chosen = choose_mode(config, world_size=num_gpus).config
    assert describe_mode(chosen) == expected
    assert (chosen.compute.mode, chosen.compute.compile_fallback) == ("eager", True)
    kept = replace(chosen, compute=config.compute, batch=config.batch)
    assert kept == config, "nothing else has changed"
    assert chosen.batch.bn_span == config.batch.bn_span


@pytest.mark.parametrize(
    ("words", "expected", "why"),
    [
        ((), "microbatch 32, compiled, CUDA graph", "4 ghost batches per microbatch, at most 256 images"),
        (("--batch.global_batch_size=24",), "microbatch 24, compiled, CUDA graph", "3 ghost batches"),
        (("--batch.global_batch_size=8",), "microbatch 8, compiled, CUDA graph", "it is a GPU's share of a step"),
        (("--batch.global_batch_size=136",), "microbatch 136, compiled", "no CUDA graph: 136 images .* more than 128"),
        (("--batch.global_batch_size=2056",), "microbatch 8, compiled", "no larger one, of at most 256 images"),  # 257
        (("--compute.mode_keeps=[batch.microbatch_size]",), "microbatch 8, compiled, CUDA graph", "size is stated"),
        (("--compute.mode_keeps=[compute.compile]",), "microbatch 32, CUDA graph", "not compiled: .* is stated"),
        (("--compute.mode_keeps=[compute.cuda_graph]",), "microbatch 32, compiled", "no CUDA graph: .* is stated"),
        (("--compute.compile=max-autotune",), "microbatch 32, compiled, CUDA graph", "at most 128"),
        (("--compute.cuda_graph=true",), "microbatch 32, compiled, CUDA graph", "4 ghost batches"),
        (("--run.digest_every_steps=1",), "microbatch 8, compiled", "run.digest_every_steps records .* graph: run.dig"),
        (
            ("--run.digest_every_steps=1", "--run.digest_layers=[conv*]"),
            "microbatch 8, eager",
            "not compiled: run.digest_layers.* cannot look",
        ),
        (("--run.noise_scale_every_steps=1",), "microbatch 8, compiled", "no CUDA graph: .*cannot read gradients"),
        (("--data.train_sizes=[[0, 8]]",), "microbatch 32, compiled, CUDA graph", ""),
        (("--data.train_sizes=[[0, 8], [1, 16]]", "--run.epochs=2"), "microbatch 32, compiled", "several sizes"),
        (
            ("--optimizer.loss=torch.nn.CrossEntropyLoss", "--optimizer.label_smoothing=0"),
            "microbatch 32, compiled",
            "optimizer.loss=torch.nn.CrossEntropyLoss is not ours",
        ),
        (("--optimizer.name=shampoo", "--optimizer.options.eps=1e-6"), "microbatch 32, compiled", "shampoo"),
        (("--batch.bn_span=16",), "microbatch 8, CUDA graph", "several ranks share .*; not compiled: compute.compile"),
        (("--batch.virtual_ranks=4",), "microbatch 8, compiled, CUDA graph", "no larger one"),
    ],
)
def test_compute_mode_keeps_what_is_stated_and_what_others_forbid(
    words: tuple[str, ...], expected: str, why: str
) -> None:
    world_size = 2 if "--batch.bn_span=16" in words else 1
    config = config_of(*EIGHTS, KEEPS_NOTHING, *words)
    chosen = choose_mode(config, world_size=world_size)
    assert chosen.note.startswith(f"compute.mode auto: {expected}; ")
    assert re.search(why, chosen.note), chosen.note
    assert describe_mode(chosen.config) == expected
    assert chosen.config.compute.compile in (None, config.compute.compile or "default")


def test_compute_mode_keeps_what_the_user_states(tmp_path: Path) -> None:
    assert config_of(name="imagenet/resnet50_8k").compute.mode_keeps == ()
    stated = config_of("--batch.microbatch_size=128", "--compute.compile=null", name="imagenet/resnet50_8k")
    assert stated.compute.mode_keeps == ("batch.microbatch_size", "compute.compile")
    assert mode_of(stated, 64) == "microbatch 128, CUDA graph"
    own = tmp_path / "own.yaml"
    own.write_text("base: imagenet/resnet50_8k\ncompute:\n  cuda_graph: false\n")
    assert config_of(name=str(own)).compute.mode_keeps == ("compute.cuda_graph",)
    own.write_text("base: imagenet/resnet50_8k\ncompute:\n  cuda_graph: false\n  mode_keeps: []\n")
    assert config_of(name=str(own)).compute.mode_keeps == ()
    assert config_of("--compute.compile=null", name=str(own)).compute.mode_keeps == ("compute.compile",)


def test_compute_mode_of_a_job_that_heals_in_place_has_no_graph() -> None:
    config = config_of("--run.heal=in_place", name="imagenet/resnet50_8k")
    chosen = choose_mode(config, world_size=64)
    assert describe_mode(chosen.config) == "microbatch 128, compiled"
    assert "no CUDA graph: run.heal=in_place cannot interrupt it" in chosen.note


@pytest.mark.parametrize("num_gpus", [8, 32, 64])
def test_compute_mode_of_a_stated_number_of_images_is_that_of_more_gpus(num_gpus: int) -> None:
    """A sweep over 8 to 64 GPUs states 8,192 / 64."""
    chosen = choose_mode(config_of("--compute.mode=128", name="imagenet/resnet50_8k"), world_size=num_gpus)
    assert describe_mode(chosen.config) == mode_of(config_of(name="imagenet/resnet50_8k"), 64)
    assert ("as with 128 images per GPU and step, at most 128" in chosen.note) == (num_gpus < 64)
    whole = choose_mode(config_of("--compute.mode=9999", name="imagenet/resnet50_8k"), world_size=num_gpus)
    assert describe_mode(whole.config) == mode_of(config_of(name="imagenet/resnet50_8k"), num_gpus)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--compute.mode=eager",), ""),
        (("--run.reproducible=true",), "as stated, since other modes change the bits that run.reproducible keeps"),
        (("--model.name=alexnet_bn", "--data.image_size=63", "--data.crop=resized"), "eager, as stated, since auto"),
        (
            ("--model.name=torchvision:vgg11",),
            "microbatch 8, eager, as stated, since auto changes only steps of resnet18",
        ),
    ],
)
def test_compute_mode_leaves_a_config_as_it_is(words: tuple[str, ...], line: str) -> None:
    config = config_of(*EIGHTS, *words)
    chosen = choose_mode(config, world_size=1)
    assert chosen.config == config
    assert line in chosen.note
    assert bool(chosen.note) == bool(line)


@pytest.mark.parametrize(
    ("memory_bytes", "words", "size"),
    [
        # 43 MB per image in fp16, 86 in fp32; half of the memory is for them
        (80 * GB, (), 256),
        (24 * GB, (), 256),
        (16 * GB, (), 128),  # 186 fit
        (80 * GB, ("--optimizer.precision=fp32", "--optimizer.loss_scale=null"), 256),
        (24 * GB, ("--optimizer.precision=fp32", "--optimizer.loss_scale=null"), 128),
        (24 * GB, ("--data.image_size=448",), 64),  # 69 fit
        (1 * GB, (), 64),  # the config's own
    ],
)
def test_compute_mode_fits_the_memory(memory_bytes: int, words: tuple[str, ...], size: int) -> None:
    growth = "--optimizer.loss_scale_growth_steps=null"
    words = (*words, growth) if any("fp32" in word for word in words) else words
    config = config_of(*words, name="imagenet/resnet50_8k")
    chosen = choose_mode(config, world_size=8, memory_bytes=memory_bytes)
    assert chosen.config.batch.microbatch_size == size
    if size == 128:
        assert re.search(r"2 ghost batches per microbatch, at most \d+ images in \d+ GB of memory", chosen.note)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT_BYTES)
def test_compute_mode_knows_what_a_forward_keeps(name: str) -> None:
    """Counted without memory, on torch's meta device."""
    with torch.device("meta"):
        model = build_model(name, num_classes=1000, norm=nn.BatchNorm2d)
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def kept_bytes(num_images: int) -> int:
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in known:
                kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.empty(num_images, 3, 224, 224, device="meta")).sum()
        return sum(kept.values())

    assert kept_bytes(3) - kept_bytes(2) == pytest.approx(KEPT_BYTES[name], rel=0.02), "images included"


def test_compute_mode_on_a_cpu_is_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(*EIGHTS)
    assert choose_as_launched(config, CPU, world_size=2) == ComputeMode(config)


def test_compute_mode_is_that_of_the_smallest_gpu_and_of_ranks_that_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that joins states the config of the others, who compare it."""
    config = config_of("--run.heal=in_place", name="imagenet/resnet50_8k")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 * GB))
    job = SimpleNamespace(
        transport=SimpleNamespace(backend=SimpleNamespace(name="nccl")),
        device=CUDA,
        world_size=64,
        gather=lambda own: [own, [8 * GB, ""]],
    )
    chosen = choose_in_job(config, job)  # type: ignore[arg-type]
    assert chosen == choose_mode(config, world_size=64, memory_bytes=8 * GB)
    job.gather = lambda own: [own, own]
    assert choose_in_job(config, job) == choose_as_launched(config, CUDA, world_size=64)  # type: ignore[arg-type]
    assert choose_as_launched(config_of("--comm.backend=tcp"), CUDA, world_size=2).note == ""
    assert MEMORY_SHARE < 1


def test_compute_mode_captures_no_sums_of_nccl_in_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not if one rank alone has them, which all are told."""
    config = config_of(name="imagenet/resnet50_8k")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GB))
    setting = "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64, expandable_segments:True"
    job = SimpleNamespace(
        transport=SimpleNamespace(backend=SimpleNamespace(name="nccl")),
        device=CUDA,
        world_size=64,
        gather=lambda own: [own, [80 * GB, setting]],
    )
    chosen = choose_in_job(config, job)  # type: ignore[arg-type]
    assert describe_mode(chosen.config) == "microbatch 128, compiled"
    assert f"no CUDA graph: NCCL may hang with {setting}" in chosen.note
    job.transport.backend.name = "single"
    assert choose_in_job(config, job).config.compute.cuda_graph  # type: ignore[arg-type]
    monkeypatch.setenv(*setting.split("=", 1))
    job.transport.backend.name = "nccl"
    with pytest.raises(ConfigError, match=naming("compute.cuda_graph=True", setting, "unset the variable")):
        require_capturable(SimpleNamespace(device=CUDA, backend=job.transport.backend))  # type: ignore[arg-type]


def test_compute_mode_of_any_number_of_gpus_is_printed_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    def line(*words: str) -> str:
        assert main(["train", "--config", "imagenet/resnet50_8k", "--dry-run", "--gpus", *words]) == 0
        return capsys.readouterr().out

    found = line("64")
    assert found.startswith("compute.mode auto: microbatch 128, compiled, CUDA graph; ")
    assert found.count("\n") == 1
    assert line("64", "--compute.mode", "eager") == "compute.mode eager: microbatch 64, eager, as stated\n"
    assert main(["train", "--config", "imagenet/resnet50_8k", "--dry-run", "--gpus=2048"]) != 0
    assert "128 microbatches, fewer than 2048 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--gpus", "0", "--dry-run"], ["--gpus=x", "--dry-run"], ["--gpus", "2"]])
def test_number_of_gpus_is_a_count_of_a_dry_run(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=naming("--gpus ")):
        load_config(["--config", "quickstart", "--compute.mode=auto", *words])


def test_compute_mode_that_was_chosen_is_named_when_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "fits_memory", lambda *args, **options: True)
    stated = config_of(*EIGHTS, KEEPS_NOTHING)
    for config, is_named in ((choose_mode(stated, world_size=1).config, True), (stated, False)):
        line = out_of_memory.explain(config, "out of memory", stated=stated, world_size=1, device=CPU)
        assert ("--compute.mode eager" in line) == is_named
