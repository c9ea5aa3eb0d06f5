"""Settings that contradict each other: each is refused by key, value and remedy, and the remedy is legal."""

import re
from typing import Any

import pytest
from error_texts import naming

from bigbatch.trainer.config.checks import check_augment
from bigbatch.trainer.config.sections import AugmentConfig, BatchConfig
from bigbatch.trainer.config.strict_yaml import parse_yaml
from tests.unit.trainer.config.test_schema import RESIDENT, SIZES, STEP, SYNTHETIC, make_config, refusal

ADAMW = {"optimizer.name": "adamw", "optimizer.momentum": None}
SGD = {"optimizer.name": "sgd", "optimizer.options.nesterov": True}
MUON = {**SGD, "optimizer.name": "muon", "optimizer.options.newton_schulz_precision": "bf16"}
SHAMPOO = {**SGD, "optimizer.name": "shampoo", "optimizer.options.block_size": 512}
FOREIGN = {"optimizer.name": "schedulefree.SGDScheduleFree", "optimizer.momentum": None}
OWN_MODEL = {"model.name": "no_such_package.models.Net"}
OWN_LOSS = {"optimizer.loss": "no_such_package.Loss", "optimizer.label_smoothing": 0.0}
FP16 = {"optimizer.precision": "fp16", "optimizer.loss_scale": 1024.0}
WEIGHTS = {"model.weights": "a.pth"}
OPS = {"augment.randaugment_ops": 2, "augment.randaugment_magnitude": 9}
GROUPS = {
    "RESIDENT": RESIDENT,
    "CYCLIC": {"schedule.name": "cyclic", "schedule.warmup_epochs": 0.0},
    "STEP": STEP,
    "SYNTHETIC": SYNTHETIC,
    "ADAMW": ADAMW,
    "SGD": SGD,
    "SHAMPOO": SHAMPOO,
    "FOREIGN": FOREIGN,
    "OWN_MODEL": OWN_MODEL,
    "OWN_LOSS": OWN_LOSS,
    "FP16": FP16,
    "WEIGHTS": WEIGHTS,
    "OPS": OPS,
    "DIGESTS": {"run.digest_layers": ("fc",), "run.digest_every_steps": 1},
    "AUDITS": {"run.audit_every_steps": 50, "run.reproducible": True},
    "NOISE": {"run.noise_scale_every_steps": 5},
}
REFUSED = """
comm.threshold_bytes=null | comm.threshold_bytes=null takes its value from comm.table | comm.table=t
comm.buffer_bytes=null | comm.buffer_bytes=null takes its value from comm.table | comm.table=t
comm.algorithm=hybrid | which is null: make one with bigbatch comm tune | comm.table=t
comm.predivide=8.0 | comm.predivide=8.0 & comm.wire_dtype & 1.0 | comm.predivide=1.0
comm.timeline_steps=[4, 3] | comm.timeline_steps=[4, 3] | comm.timeline_steps=[4, 4]
comm.warn_seconds=15.5; comm.timeout_seconds=15.0; data.patience_seconds=5.0
  | comm.warn_seconds=15.5 & comm.timeout_seconds=15, | comm.warn_seconds=15.0
compute.cuda_graph=true; comm.buffers=symmetric | comm.buffers=symmetric | comm.buffers=registered

data.num_synthetic_samples=5 | data.num_synthetic_samples=5 & data.loader=torchvision & null | SYNTHETIC
SYNTHETIC; data.balance=0.5 | data.balance=0.5 has no meaning & data.loader=synthetic: set it to 0.0 | data.balance=0.0
SYNTHETIC; data.exif_orientation=true | orientation=True has no & set it to false | data.exif_orientation=false
SYNTHETIC; data.background=white | data.background=white & data.loader=synthetic & null | data.background=null
SYNTHETIC; data.list=a.json | data.list=a.json & data.loader=synthetic & null | data.list=null
data.crop_area_min=null | data.crop_area_min & null & data.crop=resized | data.crop_area_min=0.08
RESIDENT; data.crop_area_min=0.5 | data.crop_area_min=0.5 & data.crop=padded & null | data.crop_area_min=null
data.loader=resident; data.resident_on=device | data.crop=resized conflicts with data.loader=resident | RESIDENT
data.crop=padded; data.crop_area_min=null | data.crop=padded conflicts with data.loader=torchvision | RESIDENT
RESIDENT; data.eval_crop_fraction=0.875 | data.eval_crop_fraction=0.875 | data.eval_crop_fraction=1.0
RESIDENT; data.max_skipped=3 | data.max_skipped=3 & data.loader=resident & null | data.max_skipped=null
RESIDENT; data.stage=/tmp/x | data.stage=/tmp/x & data.loader=resident & null | data.stage=null
RESIDENT; data.train_sizes=[[0, 16], [4, 32]] | data.train_sizes=[[0, 16], [4, 32]] | data.train_sizes=null
data.train_sizes=[] | data.train_sizes=[] must give epochs that rise from 0 | data.train_sizes=[[0, 16], [4, 32]]
data.train_sizes=[[0, 16], [4, 32], [2, 24]]
  | data.train_sizes=[[0, 16], [4, 32], [2, 24]] must give epochs that rise from 0 | data.train_sizes=[[0, 16], [4, 32]]
data.train_sizes=[[0, 16], [1, 0]] | data.train_sizes=[[0, 16], [1, 0]] must give sizes of 1 to 8192 pixels
augment.randaugment_ops=65; augment.randaugment_magnitude=9 | randaugment_ops=65 & 64 | augment.randaugment_ops=64
data.image_size=100000 | data.image_size=100000 is too large & 8192 | data.image_size=8192
data.train_sizes=[[0, 7], [1, 32]] | data.train_sizes=7 & model.name=resnet9 & 8 | data.train_sizes=[[0, 8], [1, 32]]

OPS; augment.randaugment_magnitude=null | magnitude=None & ops=2 & 0 to 30 (usually 9) | OPS
OPS; augment.randaugment_ops=0 | magnitude=9 & ops=0 & null | augment.randaugment_magnitude=null
OPS; augment.randaugment_magnitude=31 | augment.randaugment_magnitude=31 & most 30 | augment.randaugment_magnitude=30
OPS; model.name=resnet18; data.train_sizes=[[0, 2]] | train_sizes=2 & randaugment_ops=2 & 3 | data.train_sizes=[[0, 3]]
augment.trivial_augment=true; model.name=resnet18; data.train_sizes=[[0, 2]]
  | data.train_sizes=2 is too small for augment.trivial_augment=true: give at least 3 | data.train_sizes=[[0, 3]]
augment.cutout_size=7 | augment.cutout_size=7 & such as 8 | augment.cutout_size=8
augment.mixup_alpha=0.2; batch.bn_span=1 | batch.bn_span=1 & bn_span to at least 2 | batch.bn_span=2
augment.mixup_alpha=0.2; batch.bn_span=128 | batch.microbatch_size=64: set both | augment.mixup_alpha=0.0
augment.cutmix_alpha=0.2; batch.bn_span=128 | batch.microbatch_size=64: set both | augment.cutmix_alpha=0.0

model.name=alexnet_bn; data.image_size=63; model.options.width=8 | model.options.width & model.name & takes no options
model.name=resnet50; model.options.width=8 | model.options.width & model.name & takes zero_gamma, blurpool
model.options.blurpool=true | model.options.blurpool has no meaning with model.name= & takes width, pool_first
optimizer.options={block_size: 8} | optimizer.options.block_size has no meaning with optimizer.name= & takes nesterov
schedule.options.gamma=0.5 | schedule.options.gamma has no meaning with schedule.name= & takes power
model.options.widht=8 | ; the nearest is width
model.options.width=wide | model.options.width=wide must be int | model.options.width=4
model.options.width=null | model.options.width=None must be int | model.options.width=4

schedule.warmup_epochs=10.5 | schedule.warmup_epochs=10.5 & run.epochs=10 | schedule.warmup_epochs=10
schedule.end_lr=1.5 | schedule.end_lr=1.5 exceeds schedule.base_lr=1.0: give at most that | schedule.end_lr=1.0
STEP; schedule.options.milestone_epochs=[8.0, 4.0]
  | [8.0, 4.0] & : [4.0, 8.0] | schedule.options.milestone_epochs=[4.0, 8.0]
STEP; schedule.options.milestone_epochs=[1.0, 4.0] | [1.0, 4.0] & : [4.0] | schedule.options.milestone_epochs=[4.0]
STEP; schedule.options.milestone_epochs=[4.0, 8.0, 10.0, 12.0]
  | [4.0, 8.0, 10.0, 12.0] reaches past the end of run.epochs=10: [4.0, 8.0] does not
  | schedule.options.milestone_epochs=[4.0, 9.9]
schedule.name=polynomial; schedule.decay_epochs=8.5
  | warmup_epochs=2 & decay_epochs=8.5 & run.epochs=10 | schedule.decay_epochs=8.0
STEP; schedule.decay_epochs=3.0 | schedule.decay_epochs=3 & schedule.name=step & null | schedule.decay_epochs=null
CYCLIC; schedule.warmup_epochs=2.0 | schedule.warmup_epochs=2 has no meaning & set it to 0 | CYCLIC
CYCLIC; schedule.decay_epochs=3.0 | schedule.decay_epochs=3 & schedule.name=cyclic & null | schedule.decay_epochs=null
CYCLIC; schedule.options.cycle_epochs=11.0 | schedule.options.cycle_epochs=11 | schedule.options.cycle_epochs=10.0
CYCLIC; schedule.low_momentum=0.5; schedule.end_lr=1.0 | schedule.low_momentum=0.5 | schedule.end_lr=0.5
schedule.low_momentum=0.9 | schedule.low_momentum=0.9 must be below optimizer.momentum=0.9 | schedule.low_momentum=0.8
schedule.low_momentum=0.5; compute.cuda_graph=true | schedule.low_momentum=0.5 | compute.cuda_graph=false
ADAMW; schedule.low_momentum=0.5 | schedule.low_momentum=0.5 & optimizer.name=adamw & null | schedule.low_momentum=null
schedule.end_lr=null | schedule.end_lr is null, but schedule.name=polynomial needs it: give a value
schedule.name=cosine; schedule.end_lr=null | schedule.end_lr & null & schedule.name=cosine | schedule.end_lr=0.0
STEP; schedule.end_lr=0.1 | schedule.end_lr=0.1 & schedule.name=step & null | schedule.end_lr=null
run.eval_every_epochs=4; run.eval_offset_epochs=4
  | offset_epochs=4 & run.eval_every_epochs=4: & 3 | run.eval_offset_epochs=3

optimizer.name=lasr | optimizer.name=lasr & lars, lamb, sgd, adamw, lion, muon, shampoo; & lars.
FOREIGN; optimizer.name=schedulefree. | optimizer.name=schedulefree. & schedulefree.SGDScheduleFree | FOREIGN
FOREIGN; optimizer.name=a b.c | optimizer.name=a b.c & schedulefree.SGDScheduleFree | FOREIGN
FOREIGN; optimizer.options={lr: 0.1} | optimizer.options & lr: set schedule.base_lr instead
FOREIGN; optimizer.options={weight_decay: 0.1} | optimizer.options & weight_decay: set optimizer.weight_decay instead
FOREIGN; optimizer.name=torch.optim.SGD; optimizer.options={fused: true} | optimizer.options & fused: & lars,
FOREIGN; optimizer.name=torch.optim.SGD; optimizer.options={fused: false} | optimizer.options & fused: & lars,
FOREIGN; optimizer.sharded=true | sharded=True & name=schedulefree.SGDScheduleFree | optimizer.sharded=false
comm.wire_dtype=float16; optimizer.sharded=true | comm.wire_dtype=float16 & sharded=True | optimizer.sharded=false
optimizer.ema_decay=0.99; optimizer.ema_every_steps=1; optimizer.sharded=true
  | optimizer.ema_decay=0.99 & optimizer.sharded=True | optimizer.sharded=false
SHAMPOO; optimizer.options.eps=0.0
  | optimizer.name=shampoo & optimizer.options.eps & 1e-6 | optimizer.options.eps=1.0e-06
SHAMPOO; compute.cuda_graph=true | compute.cuda_graph=True & optimizer.name=shampoo & false | compute.cuda_graph=false
SGD; optimizer.momentum=0.0 | optimizer.options.nesterov=True & optimizer.momentum=0 | optimizer.options.nesterov=false
optimizer.options.nesterov=true; optimizer.momentum=0.0
  | optimizer.options.nesterov=True & optimizer.momentum=0 & false | optimizer.options.nesterov=false
optimizer.momentum=null | optimizer.momentum & null & optimizer.name=lars | optimizer.momentum=0.0
optimizer.name=lion | optimizer.momentum=0.9 has no meaning with optimizer.name=lion: set it to null | ADAMW
ADAMW; optimizer.options.eps=0.0 | optimizer.name=adamw & optimizer.options.eps & 1e-6 | optimizer.options.eps=1.0e-06
optimizer.lr_factors={fc.*: 1, '*': 0} | optimizer.lr_factors & '*' & 0 | optimizer.lr_factors={fc.*: 1, '*': 0.1}
optimizer.lr_factors={fc.*: 1, '*': fast} | lr_factors & '*' & 'fast' | optimizer.lr_factors={fc.*: 1, '*': 0.1}
optimizer.lr_factors={fc.*: 1, 0.5: 1} | optimizer.lr_factors & 0.5 | optimizer.lr_factors={fc.*: 1}
optimizer.lr_factors={fc.*: 1, '*': .nan} | optimizer.lr_factors & '*' & nan | optimizer.lr_factors={fc.*: 1, '*': 0.1}
FP16; optimizer.loss_scale=1000.0 | optimizer.loss_scale=1000 & 1.67772e+07 & 1024
FP16; optimizer.loss_scale=0.5 | optimizer.loss_scale=0.5 & 1 & 1.67772e+07
FP16; optimizer.loss_scale=1000000000000.0 | optimizer.loss_scale=1e+12 & 1.67772e+07
optimizer.precision=fp32; optimizer.loss_scale=8.0 | optimizer.loss_scale=8.0 | optimizer.loss_scale=null
optimizer.precision=bf16_autocast; optimizer.loss_scale_growth_steps=5
  | optimizer.loss_scale_growth_steps=5 & precision=bf16_autocast: & null | optimizer.loss_scale_growth_steps=null
optimizer.precision=fp16 | optimizer.loss_scale is null | optimizer.loss_scale=1024.0
optimizer.ema_decay=0.9 | optimizer.ema_every_steps is null, but | optimizer.ema_every_steps=1
optimizer.ema_every_steps=2 | optimizer.ema_every_steps=2 & optimizer.ema_decay & null | optimizer.ema_decay=0.0
optimizer.ema_warmup=false | optimizer.ema_warmup=false & optimizer.ema_decay | optimizer.ema_warmup=true

OWN_LOSS; optimizer.loss=focal | optimizer.loss=focal & cross_entropy & mypackage. | OWN_LOSS
OWN_LOSS; optimizer.loss='' | optimizer.loss= & cross_entropy & mypackage. | OWN_LOSS
optimizer.loss_options={gamma: 2} | optimizer.loss_options={'gamma': 2} & cross_entropy & null | OWN_LOSS
optimizer.loss_options={weight: even} | 'even' & {weight: balanced} | optimizer.loss_options={weight: balanced}
optimizer.loss_options={weight: [1, -1]} | [1, -1] & at least 0 | optimizer.loss_options={weight: {a: 0}}
optimizer.loss_options={weight: [1, true]} | [1, True] & at least 0 | optimizer.loss_options={weight: {a: .5}}
optimizer.loss_options={weight: [1, 2]} | 2 numbers & data.num_classes= | optimizer.loss_options={weight: balanced}
optimizer.loss_options={weight: {a: .nan}} | {'a': nan} & at least 0 | optimizer.loss_options={weight: {a: 2}}
OWN_LOSS; optimizer.label_smoothing=0.1 | optimizer.label_smoothing=0.1 | optimizer.label_smoothing=0.0
OWN_LOSS; run.divergence_steps=5 | run.divergence_steps=5 & no_such_package.Loss & null | run.divergence_steps=null
run.metrics={a b: m.F} | run.metrics: & a b | run.metrics={f1: m.F}
run.metrics={f1: F} | run.metrics: & f1 | run.metrics={f1: m.F}
run.metrics={f1: {name: m.F, option: {}}} | run.metrics: & f1 | run.metrics={f1: m.F}

model.options={1: 2} | model.options.1 & model.name=resnet9
schedule.options={null: 2} | schedule.options.None & schedule.name=
model.name=resnet51 | model.name=resnet51 & alexnet_bn, resnet9; & resnet50 & timm:resnet18 & mypackage.models.Net
model.name=./net.py | model.name=./net.py & timm:resnet18, | OWN_MODEL
model.name='timm:' | model.name=timm: & timm:resnet18, | OWN_MODEL
model.name=keras:resnet50 | model.name=keras:resnet50 & timm:resnet18, | OWN_MODEL
OWN_MODEL; model.options={num_classes: 1} | model.options & num_classes: set data.num_classes instead
OWN_MODEL; model.options={checkpoint_path: 1} | model.options & checkpoint_path: set model.weights instead
model.partial_weights=[a] | model.partial_weights needs model.weights | WEIGHTS
WEIGHTS; model.partial_weights=[a]; model.new_head=true | model.new_head=True | model.new_head=false
WEIGHTS; model.partial_weights=[] | model.partial_weights=[] & null | model.partial_weights=null
WEIGHTS; model.init=fan_in | model.init & model.weights & null | model.weights=null
WEIGHTS; model.init=fan_in | model.init & model.weights & null | model.new_head=true
WEIGHTS; model.init=fan_in | model.init & model.weights & null | model.partial_weights=[conv1.*]
WEIGHTS; model.linear_std=0.01 | model.linear_std & model.weights & null | model.weights=null
model.new_head=true | model.new_head=True & model.weights & false | WEIGHTS

model.name=resnet50; data.image_size=64; compute.recomputed_blocks=17
  | compute.recomputed_blocks=17, & model.name=resnet50 & 16 | compute.recomputed_blocks=16
model.name=alexnet_bn; data.image_size=64; compute.recomputed_blocks=1
  | compute.recomputed_blocks=1, & model.name=alexnet_bn & 0 | compute.recomputed_blocks=0
OWN_MODEL; compute.recomputed_blocks=1 | compute.recomputed_blocks=1 | compute.recomputed_blocks=0
compute.compile_fallback=true | compute.compile_fallback=True & false | compute.compile=max-autotune
compute.compile=default; batch.bn_span=128 | compute.compile to null & batch.bn_span to at most 64 | batch.bn_span=64

run.stop_metric=accuracy; run.stop_after_evaluations=3 | run.stop_metric=accuracy | run.stop_metric=top5
run.stop_metric=loss | run.stop_after_evaluations is null & run.stop_metric=loss | run.stop_after_evaluations=3
run.stop_after_evaluations=2 | run.stop_after_evaluations=2 & run.stop_metric & null | run.stop_metric=loss
run.divergence_steps=5; data.num_classes=1 | run.divergence_steps=5 & data.num_classes=1: & null | data.num_classes=2
run.loggers=[wandb, wandb] | run.loggers & wandb twice | run.loggers=[wandb]

run.reproducible=true; batch.bn_span=128 | run.reproducible=True & batch.bn_span=128 | batch.bn_span=64
run.reproducible=true; compute.compile=default | run.reproducible=True & compute.compile=default | compute.compile=null
run.reproducible=true; comm.wire_dtype=bfloat16 | run.reproducible=True | comm.wire_dtype=null

run.digest_layers=[fc, block.*] | run.digest_layers=['fc', 'block.*'] | run.digest_every_steps=1
DIGESTS; compute.compile=default | run.digest_layers=['fc'] & set compute.compile to null | compute.compile=null
DIGESTS; compute.cuda_graph=true | run.digest_layers=['fc'] & set compute.cuda_graph to false | compute.cuda_graph=false

run.audit_every_steps=50 | run.audit_every_steps=50 & set run.reproducible to true | run.reproducible=true
AUDITS; run.compare_every_steps=0 | run.audit_every_steps=50 & run.compare_every_steps | run.compare_every_steps=100
AUDITS; compute.cuda_graph=true | run.audit_every_steps=50 & set compute.cuda_graph to false | compute.cuda_graph=false

NOISE; batch.bn_span=128
  | noise_scale_every_steps=5 & batch.bn_span & 64 & batch.microbatch_size & 128 | batch.bn_span=64
NOISE; batch.global_batch_size=64 | noise_scale_every_steps=5 & batch.microbatch_size & 32 | batch.global_batch_size=128
NOISE; batch.global_batch_size=1; batch.microbatch_size=1; batch.bn_span=1 | noise_scale_every_steps=5 & raise batch
NOISE; compute.cuda_graph=true | noise_scale_every_steps=5 & set compute.cuda_graph to false | compute.cuda_graph=false
"""
"""Settings
  | parts of the refusal | settings that make it legal, if the test knows any; the refusal names their keys."""


def settings(text: str) -> dict[str, Any]:
    """Read groups and key=value, with tuples for lists."""
    found: dict[str, Any] = {}
    for part in text.strip().split("; "):
        key, _, word = part.partition("=")
        value = parse_yaml(word)
        own = {key: tuple(tuple(e) if isinstance(e, list) else e for e in value) if isinstance(value, list) else value}
        found |= GROUPS.get(part, own)
    return found


@pytest.mark.parametrize("case", [line for line in REFUSED.replace("\n  |", " |").splitlines() if line])
def test_contradiction_is_refused_and_its_remedy_is_legal(case: str) -> None:
    changes, words, *remedy = case.split(" | ")
    told = refusal(settings(changes))
    assert re.search(naming(*words.split(" & ")), told)
    if remedy:
        make_config({**settings(changes), **settings(remedy[0])})
        if remedy[0] not in GROUPS and "model.init" not in changes:  # which has three remedies, and names one
            assert set(re.findall(r"[\w.]+", remedy[0].partition("=")[0])) <= set(re.findall(r"[\w.]*\w", told))


@pytest.mark.parametrize(
    "changes",
    [
        *(ADAMW, {**ADAMW, "optimizer.name": "lamb"}, SGD, MUON, SHAMPOO, FOREIGN),
        *({**each, "optimizer.sharded": True} for each in (SGD, MUON, SHAMPOO)),
        *({**FP16, "optimizer.loss_scale": scale} for scale in (1.0, 2.0**24)),
        *({**FP16, "optimizer.loss_scale_growth_steps": steps} for steps in (1, 2000)),
        *({"data.stage": "/tmp/x"}, {"data.max_skipped": 3}, {**SYNTHETIC, "data.train_sizes": SIZES}),
        *({"schedule.decay_epochs": 0.5}, {"batch.bn_span": 1}, OPS | {"augment.randaugment_magnitude": 0}),
        *({**OWN_MODEL, "model.options": {"width": 3}}, {**OWN_LOSS, "optimizer.loss_options": {"gamma": 2}}),
        *({"model.name": name} for name in ("timm:resnet50.a1_in1k", "torchvision:resnet18")),
    ],
)
def test_choice_is_legal_and_nothing_is_imported_for_it(changes: dict[str, Any]) -> None:
    make_config(changes)  # no_such_package is not there


def test_augmentations_as_by_default_have_no_check_to_skip() -> None:
    """A config checks only others: see _check_together."""
    assert list(check_augment(AugmentConfig(), BatchConfig(bn_span=1))) == []
