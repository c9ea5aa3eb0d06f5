"""Find the key that an unknown name means: a misspelt key, or an option of another trainer."""

from collections.abc import Iterable

from bigbatch.errors import nearest

OTHERS_NAMES = {
    "aa": "augment.randaugment_ops",
    "amp": "optimizer.precision",
    "amp_dtype": "optimizer.precision",
    "arch": "model.name",
    "auto_augment": "augment.randaugment_ops",
    "batch_size": "batch.global_batch_size",
    "clip_grad": "optimizer.clip_norm",
    "clip_grad_norm": "optimizer.clip_norm",
    "criterion": "optimizer.loss",
    "cutmix": "augment.cutmix_alpha",
    "data": "data.root",
    "data_dir": "data.root",
    "data_path": "data.root",
    "dist_backend": "comm.backend",
    "dtype": "optimizer.precision",
    "img_size": "data.image_size",
    "learning_rate": "schedule.base_lr",
    "log_wandb": "run.loggers",
    "logger": "run.loggers",
    "log_interval": "run.log_every_steps",
    "lr": "schedule.base_lr",
    "lr_gamma": "schedule.options.gamma",
    "lr_min": "schedule.end_lr",
    "lr_scheduler": "schedule.name",
    "lr_step_size": "schedule.options.milestone_epochs",
    "lr_warmup_epochs": "schedule.warmup_epochs",
    "min_lr": "schedule.end_lr",
    "mixup": "augment.mixup_alpha",
    "model": "model.name",
    "model_ema": "optimizer.ema_decay",
    "model_ema_decay": "optimizer.ema_decay",
    "num_train_epochs": "run.epochs",
    "opt": "optimizer.name",
    "output": "run.directory",
    "output_dir": "run.directory",
    "pretrained": "model.weights",
    "print_freq": "run.log_every_steps",
    "sched": "schedule.name",
    "smoothing": "optimizer.label_smoothing",
    "sync_bn": "batch.bn_span",
    "torchcompile": "compute.compile",
    "train_crop_size": "data.image_size",
    "verbose": "run.log_every_steps",
    "wd": "optimizer.weight_decay",
    "workers": "data.num_threads",
    "num_workers": "data.num_threads",
}
"""Option of PyTorch's ImageNet example, timm's train.py or torchvision's references -> key of bigbatch."""

_ACCUMULATION = "it follows from batch.global_batch_size, batch.microbatch_size and the number of ranks"
ELSEWHERE = {
    "device": "bigbatch launch ... --device cpu trains on the CPU",
    "evaluate": "bigbatch evaluate RUN does that",
    "gpus": "bigbatch launch local --ranks N says how many",
    "grad_accum_steps": _ACCUMULATION,
    "gradient_accumulation_steps": _ACCUMULATION,
    "local_rank": "bigbatch launch tells each rank its own",
    "nproc_per_node": "bigbatch launch local --ranks N, or --ranks-per-node N with several nodes",
    "test_only": "bigbatch evaluate RUN does that",
    "world_size": "bigbatch launch ... --ranks N says how many",
}
"""Their options that no key sets -> hint: what sets them in bigbatch."""


def meant_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that was meant, in any section; empty if none is similar."""
    known = list(known)
    last = name.rpartition(".")[2].replace("-", "_")
    if OTHERS_NAMES.get(last) in known:
        return OTHERS_NAMES[last]
    # then without the section, which may be wrong or missing
    whole = {each: each for each in known} if "." in name else {}
    for words, word in ((whole, name.replace("-", "_")), ({each.rpartition(".")[2]: each for each in known}, last)):
        if near := nearest(word, words):
            return words[near]
    return ""
