"""Law 4: all ranks hold identical bits, and take the same decisions: six steps on data of each rank's own."""

import hashlib
from functools import partial

import torch
import torch.nn.functional as F

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.trainer.config.sections import SCALED
from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.foreign import make_foreign
from bigbatch.trainer.models.norm import GhostBatchNorm2d, flatten_running_statistics
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.optim.param_groups import param_groups
from bigbatch.trainer.step.loss_scale import Scaling
from bigbatch.trainer.step.precision import Precision
from tests.laws.jobs import Forked, run

PRECISIONS = ("fp32", "bf16", "fp16", "fp16_autocast")
MODELS = ("WithBatchNorm", "WithAttention")
OVERFLOW_STEP, OVERFLOW_RANK = 3, 1


def agree(*cases: str) -> int:
    """Train each case, PRECISION or PRECISION:MODEL; the process fails when the ranks disagree."""
    torch.set_num_threads(1)
    communicator = connect(backend="gloo", algorithm="ring")
    for case in cases:
        precision_name, _, foreign = case.partition(":")
        train(communicator, precision_name, foreign)
        print(f"rank {communicator.rank} agreed on 6 steps of {case}", flush=True)
    communicator.close()
    return 0


def train(communicator: Communicator, precision_name: str, foreign: str) -> None:
    """Compare weights and loss scale after each of six steps."""
    torch.manual_seed(0)
    norm = partial(GhostBatchNorm2d, bn_span=8, ghosts_per_step=1)
    if foreign:
        model = make_foreign(foreign, num_classes=4, norm=norm, options={})
    else:
        model = build_model("resnet9", num_classes=4, norm=norm, width=4)
    scaling = Scaling(initial=65536.0, growth_steps=2000) if precision_name in SCALED else None
    precision = Precision(model, name=precision_name, device=torch.device("cpu"), scaling=scaling, clip_norm=1.0)
    statistics_N = flatten_running_statistics(model)
    optimizer = LARS(param_groups(model, weight_decay=1e-4, substitute=precision.masters), lr=1.0)
    reducer = GradientReducer(model.named_parameters(), communicator, threshold_bytes=2000, buffer_bytes=8000)
    generator = torch.Generator().manual_seed(communicator.rank)
    for step in range(6):
        before = fingerprint(precision)
        images_BCHW = torch.randn(8, 3, 16, 16, generator=generator).to(precision.compute_dtype)
        labels_B = torch.randint(0, 4, (8,), generator=generator)
        reducer.zero_grad()
        with precision.forward():
            logits_BK = model(images_BCHW).float()
        if statistics_N.numel():
            reducer.start_extra(statistics_N, label="statistics")
        precision.backward(F.cross_entropy(logits_BK, labels_B) / communicator.world_size)
        reducer.wait()
        is_overflow = precision_name in SCALED and step == OVERFLOW_STEP
        if is_overflow:
            overflow_on_one_rank(reducer, communicator)
        statistics_N.div_(communicator.world_size)
        precision.update_(optimizer)
        after = fingerprint(precision)
        communicator.agree("the weights", after + hashlib.sha256(statistics_N.numpy().tobytes()).hexdigest())
        communicator.agree("the loss scale", str(precision.state_dict()))
        assert (after == before) == is_overflow, f"step {step} was skipped or not skipped wrongly"


def overflow_on_one_rank(reducer: GradientReducer, communicator: Communicator) -> None:
    """An infinite gradient on one rank, before its buffer is summed once more."""
    if communicator.rank == OVERFLOW_RANK:
        reducer.buffers[0][0] = float("inf")
    communicator.sum_(reducer.buffers[0], label="buffer with an overflow")


def fingerprint(precision: Precision) -> str:
    """Hash of all master weights, byte by byte."""
    digest = hashlib.sha256()
    for name in sorted(precision.masters):
        digest.update(precision.masters[name].detach().numpy().tobytes())
    return digest.hexdigest()


def test_weights_are_identical_after_each_step() -> None:
    """Different data on each rank, an overflow on one rank only: the same bits everywhere after every step."""
    cases = (*PRECISIONS, *(f"fp32:tests.laws.foreign_models.{name}" for name in MODELS))
    done = run(Forked(cases, ranks=3, target="tests.laws.test_law4_ranks_agree:agree"))
    for case in cases:
        assert len([line for line in done.stdout.splitlines() if line.endswith(f"6 steps of {case}")]) == 3, done.stdout
