"""Compiled regions, recomputed blocks, and statistics that are folded once per microbatch."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from error_texts import naming
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode

from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import ComputeError, ConfigError
from bigbatch.trainer.build import compiled as build_compiled
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build import model as build_model_file
from bigbatch.trainer.build.compute import logits_of_noise, set_up_compute_
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.config.checks import RESIDUAL_BLOCKS
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.machine import host
from bigbatch.trainer.models import MODELS, build_model, regions
from bigbatch.trainer.models.norm import GhostBatchNorm2d, MicrobatchStatistics, NormFactory, flatten_running_statistics
from bigbatch.trainer.models.regions import compile_regions_, recompute_, restore_regions_
from bigbatch.trainer.models.spread_norm import RankGroup
from bigbatch.trainer.step.precision import to_half_
from bigbatch.trainer.step.statistics import StepStatistics
from tests.unit.trainer.models.test_spread_norm import Replay

COUNT, SPAN, MICROBATCHES, CLASSES = 4, 2, 3, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "resnet18": {"zero_init_residual": False},
    "resnet50": {"zero_init_residual": False},
    "resnet9": {"width": 2, "is_whitened": True, "celu_alpha": 0.3},
    "alexnet_bn": {"dropout": 0.0},
}
SMALLEST = {"resnet18": 32, "resnet50": 32, "resnet9": 8, "alexnet_bn": 63}


def make(name: str, *, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    """A model as it trains, and its running statistics."""
    torch.manual_seed(0)
    norm = partial(GhostBatchNorm2d, bn_span=SPAN, ghosts_per_step=COUNT // SPAN)
    model = build_model(name, num_classes=CLASSES, norm=norm, **OPTIONS[name])
    to_half_(model, dtype)
    statistics_N = flatten_running_statistics(model)
    MicrobatchStatistics(model, statistics_N, take=statistics_N.lerp_)
    return model, statistics_N


def make_images(name: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = SMALLEST[name]
    return [torch.randn(COUNT, 3, size, size, generator=generator).to(dtype) for _ in range(MICROBATCHES)]


def step(model: nn.Module, images: list[Tensor]) -> list[Tensor]:
    """The gradients of a step."""
    labels_B = torch.arange(COUNT) % CLASSES
    for images_BCHW in images:
        F.cross_entropy(model(images_BCHW), labels_B).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_residual_blocks_are_those_that_the_config_knows(name: str) -> None:
    with torch.device("meta"):
        model: Any = build_model(name, num_classes=2, norm=nn.BatchNorm2d)
    assert len(model.residual_blocks()) == RESIDUAL_BLOCKS[name]
    drawn = [m for block in model.residual_blocks() for m in block.modules() if isinstance(m, nn.Dropout)]
    assert not drawn, "a block that draws random numbers must draw the same again"


def test_statistics_of_a_step_are_the_mean_over_its_ghost_batches() -> None:
    norm = GhostBatchNorm2d(2, bn_span=SPAN, ghosts_per_step=COUNT // SPAN)
    model = nn.Sequential(norm)
    statistics_N = flatten_running_statistics(model)
    statistics = StepStatistics(statistics_N, microbatches=MICROBATCHES)
    MicrobatchStatistics(model, statistics_N, take=statistics.take_)
    before_N = statistics_N.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0])).double()
    images = torch.randn(MICROBATCHES, COUNT, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    for images_BCHW in images:
        model(images_BCHW)
    assert torch.equal(statistics_N.double(), before_N), "they move once in a step"
    statistics.average_()
    ghosts_GNC = images.double().view(-1, SPAN, 2, 9).transpose(2, 3).reshape(-1, SPAN * 9, 2)
    means = torch.cat([ghosts_GNC.mean(1).mean(0), ghosts_GNC.var(1).mean(0)])
    want_N = 0.9 * before_N + 0.1 * means
    torch.testing.assert_close(statistics_N.double(), want_N, rtol=8 * 2**-24, atol=8 * 2**-24)
    assert norm.running_var is not None
    assert torch.equal(norm.running_var, statistics_N[2:4])


def test_statistics_change_by_training_through_the_model_itself_alone() -> None:
    model, statistics_N = make("resnet9")
    (images_BCHW, *_), before_N = make_images("resnet9", torch.float32), statistics_N.clone()
    model.forward(images_BCHW)
    assert torch.equal(statistics_N, before_N)
    model.eval()(images_BCHW)
    assert torch.equal(statistics_N, before_N)
    model.train()(images_BCHW)
    assert not torch.equal(statistics_N, before_N)


@pytest.mark.parametrize(
    ("name", "num_graphs"),
    # stem, head, and the blocks of different shapes
    [pytest.param("resnet18", 9, marks=pytest.mark.long), ("resnet9", 7), ("alexnet_bn", 2)],
)
def test_compiled_region_is_one_graph_for_all_microbatches(name: str, num_graphs: int) -> None:
    """fullgraph=True lets no graph break pass."""
    model, statistics_N = make(name)
    twin, twins_N = make(name)
    names, counter, images = list(model.state_dict()), CompileCounter(), make_images(name, torch.float32)
    compile_regions_(model, mode=None, backend=counter)
    with torch.no_grad():  # the first pass of all would be in another mode
        logits = [model(images_BCHW) for images_BCHW in images]
        assert counter.frame_count == num_graphs
        assert all(map(torch.equal, logits, (twin(images_BCHW) for images_BCHW in images)))
    assert torch.equal(statistics_N, twins_N)
    assert list(model.state_dict()) == names
    restore_regions_(model)
    model(images[0])
    assert counter.frame_count == num_graphs


@pytest.mark.parametrize(("device", "is_gpu"), [("cpu", False), ("cuda", True)])
@pytest.mark.parametrize("mode", [None, "max-autotune-no-cudagraphs"])
def test_compiler_for_a_gpu_keeps_the_settings_of_the_mode(
    device: str, is_gpu: bool, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda forward, **given: settings.update(given) or forward)
    with FakeTensorMode():  # tensors that have a device and no values
        compile_regions_(nn.Linear(2, 2, device=device), mode=mode)
    tuned = {"max_autotune": True, "coordinate_descent_tuning": True} if mode else {}
    assert settings.get("options") == ({**tuned, **regions.GPU_OPTIONS} if is_gpu else None)
    assert settings.get("mode") == (None if is_gpu else mode)


@pytest.mark.long
def test_compiled_step_is_the_eager_one() -> None:
    """In float64: sums of up to 1e4 products, some ten after one another, and no ReLU that rounding flips."""
    grads = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        norm = partial(GhostBatchNorm2d, bn_span=SPAN, ghosts_per_step=COUNT // SPAN)
        model = build_model("resnet9", num_classes=CLASSES, norm=norm, **OPTIONS["resnet9"]).double()
        if is_compiled:
            compile_regions_(model, mode=None, backend="aot_eager")
        grads.append(step(model, make_images("resnet9", torch.float64)[:1]))
    for got, want in zip(*grads, strict=True):
        assert float((got - want).norm()) <= 1e5 * 2**-53 * float(want.norm())


@pytest.mark.long
def test_compiler_fuses_norm_add_and_relu() -> None:
    """All ghost batches in one kernel a norm, in channels-last memory, without a copy beside it."""
    if failure := cxx_failure():
        pytest.skip(failure)
    block = make("resnet18")[0].to(memory_format=torch.channels_last).layer1[1]
    images_BCHW = torch.randn(COUNT, 64, 8, 8).contiguous(memory_format=torch.channels_last)
    _, (code,) = run_and_get_code(torch.compile(block, fullgraph=True), images_BCHW)
    calls = re.findall(r"^ +(?:buf\d+ = )?((?:cpp_fused|extern_kernels|torch\.ops\.aten)[\w.]*)\(", code, re.M)
    assert [each for each in calls if not each.startswith("cpp_fused")] == 2 * ["extern_kernels.convolution"]
    first, last = (each for each in calls if each.startswith("cpp_fused"))
    assert "batch_norm" in first
    assert "relu" in first
    assert all(each in last for each in ("batch_norm", "add", "relu"))


def cxx_failure() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_blocks", "dtype"),
    [pytest.param("resnet18", 3, torch.bfloat16, marks=pytest.mark.long), ("resnet9", 2, torch.float32)],
)
def test_recomputed_blocks_change_no_bit_and_keep_less(name: str, num_blocks: int, dtype: torch.dtype) -> None:
    results, kept = [], []
    for count in (0, num_blocks):
        model, statistics_N = make(name, dtype=dtype)
        names = list(model.state_dict())
        recompute_(model, count)
        assert list(model.state_dict()) == names
        kept.append(kept_numbers(model, make_images(name, dtype)[0]))
        results.append([statistics_N, *step(model, make_images(name, dtype))])
    assert all(map(torch.equal, *results))
    assert kept[1] < kept[0]


def kept_numbers(model: nn.Module, images_BCHW: Tensor) -> int:
    """How many a forward keeps for backward, weights included."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.forward(images_BCHW)
    return sum(sizes.values())


class OneBlock(nn.Module):
    """Two norms whose ghost batches lie on several ranks."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__()
        norm = partial(GhostBatchNorm2d, bn_span=2 * COUNT, ghosts_per_step=1, group=group)
        self.conv = nn.Conv2d(3, 3, 1)
        self.block = nn.Sequential(norm(3), nn.ReLU(), nn.Conv2d(3, 3, 3), norm(3))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features_BCHW: Tensor = self.block(self.conv(images_BCHW))
        return features_BCHW

    def residual_blocks(self) -> list[nn.Module]:
        return [self.block]

    def regions(self) -> list[Any]:
        return []


@pytest.mark.parametrize("later", [False, True])
def test_recomputed_blocks_of_ranks_that_share_ghost_batches_go_together(later: bool) -> None:
    """All gather twice more in backward, in the same order. later: something follows the block's last norm."""

    def work(group: RankGroup, rank: int, *, num_blocks: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = OneBlock(group)
        if later:
            model.block.append(nn.Sigmoid())
        statistics_N = flatten_running_statistics(model)
        MicrobatchStatistics(model, statistics_N, take=statistics_N.lerp_)
        recompute_(model, num_blocks)
        images_BCHW = torch.randn(COUNT, 3, 4, 4, generator=torch.Generator().manual_seed(rank))
        model(images_BCHW).square().sum().backward()
        return [statistics_N, *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = Replay(2, num_gathers=4).run(partial(work, num_blocks=0))
    again = Replay(2, num_gathers=6).run(partial(work, num_blocks=1))
    for a, b in zip(plain, again, strict=True):
        assert len(a) == 1 + 4 + 4
        assert all(map(torch.equal, a, b))


def quickstart(*words: str, sizes: str = "null") -> Config:
    synthetic = ("--data.loader=synthetic", "--data.num_synthetic_samples=64", "--data.image_size=16")
    batch = ("--batch.global_batch_size=24", "--batch.microbatch_size=4", "--batch.bn_span=2")
    options = [f"--data.train_sizes={sizes}", *(f"--compute.{word}" for word in words)]
    return load_config(["--config", "quickstart", "--model.options.width=2", *synthetic, *batch, *options])


def parts_of(config: Config) -> Any:
    communicator = connect(env=ALONE, backend="gloo", algorithm="ring")
    plan = make_plan(config, communicator, num_samples=64, first_step=0)
    return make_parts(config, communicator, plan=plan, tuned=None)


def broken(graph: object, inputs: object) -> Callable[..., Any]:
    raise RuntimeError("no compiler\n   was found")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_compiled, "compile_regions_", partial(compile_regions_, backend=broken))
    monkeypatch.setattr(regions, "set_compile_cache", lambda torchs_own: None)


@pytest.mark.long
def test_compiled_code_goes_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Though torch has named its own folder when it was imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    monkeypatch.setattr(build_compiled, "compile_regions_", partial(compile_regions_, backend="eager"))
    parts_of(quickstart("compile=default"))
    assert cache_dir() == str(tmp_path / "bigbatch" / "compiled")


@pytest.mark.long
def test_compiler_that_is_loaded_leaves_no_folder_beside_temporary_files(tmp_path: Path) -> None:
    """In a process of its own, as it is here already. It has its switch from a run that became reproducible before."""
    (tmp_path / "tmp").mkdir()
    script = (
        "from bigbatch.trainer.machine.host import set_deterministic; set_deterministic(2)\n"
        "from bigbatch.trainer.models.regions import compile_failure\n"
        "print(compile_failure(lambda: None) or 'good')\n"
        "from torch._inductor import config; print(config.deterministic)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environ |= {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=300)
    assert done.stdout == "good\nTrue\n", done.stderr
    assert not list((tmp_path / "tmp").iterdir())


def test_compiler_that_is_loaded_is_deterministic_if_torch_is() -> None:
    """It has a switch of its own."""
    before = torch.get_deterministic_debug_mode()
    try:
        for mode in (2, 0, 2):
            host.set_deterministic(mode)
            assert (inductor_config.deterministic, torch.get_deterministic_debug_mode()) == (mode == 2, mode)
    finally:
        host.set_deterministic(before)


class OnlyBelow24(nn.Module):
    """Refuses images of 24 pixels and more."""

    def __init__(self, norm: NormFactory) -> None:
        super().__init__()
        self.norm, self.fc = norm(3), nn.Linear(3, 10)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        assert images_BCHW.shape[-1] < 24, "too large"
        self.calls += self.training
        logits_BK: Tensor = self.fc(self.norm(images_BCHW).mean((2, 3)))
        return logits_BK


def test_training_size_that_a_model_refuses_ends_the_run_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not epochs later, when the run comes to it. Sizes that it takes leave statistics and draws alone."""
    monkeypatch.setattr(build_model_file, "build_classifier", lambda config, norm: OnlyBelow24(norm))
    plain = parts_of(quickstart())
    draw = torch.random.get_rng_state()
    parts = parts_of(quickstart("channels_last=false", sizes="[[0, 8], [1, 16]]"))
    assert torch.equal(torch.random.get_rng_state(), draw)
    assert torch.equal(parts.statistics.running_N, plain.statistics.running_N)
    assert parts.model.get_buffer("calls") == 0
    with pytest.raises(ConfigError, match=naming("model.name=resnet9", "images of 24 x 24", "too large")):
        parts_of(quickstart(sizes="[[0, 16], [1, 24]]"))


@pytest.mark.usefixtures("no_compiler")
def test_compile_that_fails_ends_the_run_in_one_line() -> None:
    with pytest.raises(ComputeError) as caught:
        parts_of(quickstart("compile=default"))
    text = str(caught.value)
    named = ("compute.compile=default: ", "RuntimeError: no compiler was found;", "compute.compile=null")
    assert re.search(naming(*named, "compute.compile_fallback=true"), text)
    assert "\n" not in text


@pytest.mark.usefixtures("no_compiler")
def test_compile_that_fails_is_left_out_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    parts = parts_of(quickstart("compile=default", "compile_fallback=true", "recomputed_blocks=2"))
    (note,) = parts.notes
    assert not parts.is_compiled
    assert note == "not compiled: backend='broken' raised: RuntimeError: no compiler was found"
    assert capsys.readouterr().err.startswith("compiling the model")
    with_own = [name for name, module in parts.model.named_modules() if "forward" in vars(module)]
    assert with_own == ["layer1.1", "layer3.1"], "those that are recomputed"


@pytest.mark.usefixtures("no_compiler")
def test_compile_is_left_out_on_all_ranks_where_one_cannot() -> None:
    config, model = quickstart("compile=default", "compile_fallback=true"), parts_of(quickstart()).model
    del model.forward  # which explains a first forward, where nothing is compiled
    env = SimpleNamespace(local_rank=2, local_size=3)
    facts = SimpleNamespace(rank=2, world_size=3, device=torch.device("cpu"), env=env)
    facts.connection = SimpleNamespace(control=SimpleNamespace(gather=lambda own, **how: ["", "no C++", own]))
    normalize = build_input.make_normalize(config, facts)  # type: ignore[arg-type]
    logits = partial(logits_of_noise, model, normalize=normalize, forward=nullcontext)
    notes = set_up_compute_(config, model, facts, logits=logits)  # type: ignore[arg-type]
    assert notes == ["not compiled: rank 1: no C++"]
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("local_rank", [0, 1])
def test_first_rank_of_a_host_compiles_before_the_others(local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the others load what it has written, at any number of them."""
    done: list[str] = []
    workers: list[str | None] = []
    monkeypatch.setattr(build_compiled, "usable_cores", lambda: list(range(24)))
    monkeypatch.setattr(build_compiled, "memory_left", lambda: 1e12)
    monkeypatch.setattr(build_compiled, "virtual_memory", lambda: SimpleNamespace(available=1e12))
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr(build_compiled, "compile_failure", lambda first_call: done.append("compile") or "")
    monkeypatch.setattr(
        *(build_compiled, "compile_regions_"),
        lambda model, mode: workers.append(os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")),  # as torch's compiler
    )

    def gather(own: str, *, what: str, timeout_seconds: float) -> list[str]:
        assert timeout_seconds > 600, "a compilation takes minutes"
        done.append("meet")
        return [own, own]

    connection = SimpleNamespace(control=SimpleNamespace(gather=gather))
    env = SimpleNamespace(local_rank=local_rank, local_size=9)
    facts = SimpleNamespace(rank=1, world_size=9, device=torch.device("cpu"), env=env, connection=connection)
    config, model = quickstart("compile=default"), parts_of(quickstart()).model
    assert set_up_compute_(config, model, facts, logits=lambda count, size: torch.zeros(count, 2)) == []  # type: ignore[arg-type]
    assert done == [["compile", "meet", "meet"], ["meet", "compile", "meet"]][local_rank]
    assert workers == [["24"], ["3"]][local_rank]


@pytest.mark.parametrize(
    ("cores", "memory", "ranks", "workers"),
    [
        (256, inf, 1, 32),
        (256, inf, 8, 32),
        (64, inf, 8, 8),
        (64, 20e9, 1, 18),
        (64, 20e9, 8, 2),
        (2, inf, 8, 1),
        (8, 0, 1, 1),
    ],
)
def test_processes_that_compile_follow_cores_and_memory(
    cores: int, memory: float, ranks: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch starts as many as there are cores, up to 32, for each rank; 20e9 bytes hold 18 of 2**30."""
    monkeypatch.setattr(build_compiled, "usable_cores", lambda: list(range(cores)))
    for limit, available in ((memory, inf), (inf, memory)):
        monkeypatch.setattr(build_compiled, "memory_left", lambda limit=limit: limit)
        free = SimpleNamespace(available=available)
        monkeypatch.setattr(build_compiled, "virtual_memory", lambda free=free: free)
        assert build_compiled.most_workers(ranks) == workers


@pytest.mark.long
def test_compile_before_the_run_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, statistics, gradients and random numbers are those of a run that is not compiled; one graph more for
    each region in evaluation."""
    counter = CompileCounter()
    monkeypatch.setattr(build_compiled, "compile_regions_", partial(compile_regions_, backend=counter))
    monkeypatch.setattr(regions, "set_compile_cache", lambda torchs_own: None)
    states = []
    for words in ((), ("compile=default",)):
        parts = parts_of(quickstart(*words))
        tensors = [
            *parts.model.state_dict().values(),
            parts.statistics.running_N,
            *parts.reducer.buffers,
            torch.rand(3),
        ]
        states.append([tensor.clone() for tensor in tensors])
    assert all(map(torch.equal, *states))
    assert parts.model.training
    num_graphs = counter.frame_count
    assert num_graphs == 2 * 7
    images_BCHW = parts.normalize(torch.zeros(4, 16, 16, 3, dtype=torch.uint8).permute(0, 3, 1, 2))
    for _ in range(3):
        parts.model(images_BCHW)
    with torch.no_grad():
        parts.model.eval()(images_BCHW)
    assert counter.frame_count == num_graphs, "nothing is left to compile in the run"


@pytest.mark.parametrize("is_last", [True, False])
def test_memory_format_of_weights_and_images_is_that_of_the_config(is_last: bool) -> None:
    parts = parts_of(quickstart(f"channels_last={is_last}"))
    weight = parts.model.layer1[0][0].weight
    images_BCHW = parts.normalize(torch.zeros(4, 16, 16, 3, dtype=torch.uint8).permute(0, 3, 1, 2))
    for tensor in (weight, images_BCHW):
        assert tensor.is_contiguous(memory_format=torch.channels_last) == is_last
        assert tensor.is_contiguous() != is_last


@pytest.mark.parametrize("wanted", [True, False])
def test_cudnn_searches_where_the_config_says_so(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not wanted)
    gpu = SimpleNamespace(device=torch.device("cuda", 0))
    host.set_up_process(gpu, cudnn_benchmark=wanted)  # type: ignore[arg-type]
    assert torch.backends.cudnn.benchmark == wanted
