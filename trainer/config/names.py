"""Names that other trainers give to keys."""

from collections.abc import Iterable

from bigbatch.errors import nearest

_OTHER_TRAINERS_OPTIONS = {
    "augment.cutmix_alpha": "cutmix",
    "augment.erasing_probability": "random_erase reprob",
    "augment.mixup_alpha": "mixup",
    "augment.randaugment_ops": "aa auto_augment",
    "batch.bn_span": "sync_bn",
    "batch.global_batch_size": "batch_size",
    "comm.backend": "dist_backend",
    "compute.compile": "torchcompile",
    "data.image_size": "img_size train_crop_size",
    "data.num_threads": "workers num_workers",
    "data.root": "data data_dir data_path",
    "model.name": "arch model",
    "model.weights": "pretrained",
    "optimizer.clip_norm": "clip_grad clip_grad_norm",
    "optimizer.ema_decay": "model_ema model_ema_decay",
    "optimizer.label_smoothing": "smoothing",
    "optimizer.loss": "criterion",
    "optimizer.name": "opt",
    "optimizer.precision": "amp amp_dtype dtype",
    "optimizer.weight_decay": "wd",
    "run.directory": "output output_dir",
    "run.epochs": "num_train_epochs",
    "run.log_every_steps": "log_interval print_freq verbose",
    "run.loggers": "log_wandb logger",
    "schedule.base_lr": "learning_rate lr",
    "schedule.end_lr": "lr_min min_lr",
    "schedule.name": "lr_scheduler sched",
    "schedule.options.gamma": "lr_gamma",
    "schedule.options.milestone_epochs": "lr_step_size",
    "schedule.warmup_epochs": "lr_warmup_epochs",
}
"""Key of bigbatch -> options of PyTorch's ImageNet example, timm's train.py and torchvision's references."""
KEY_OF_OTHER_NAME = {word: key for key, words in _OTHER_TRAINERS_OPTIONS.items() for word in words.split()}

_ACCUMULATION = "it follows from batch.global_batch_size, batch.microbatch_size and the number of ranks"
SET_OUTSIDE_CONFIG = {
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
"""Options of these trainers that no key sets -> hint: what sets them in bigbatch."""


def closest_key(name: str, known: Iterable[str]) -> str:
    """Return the known name that was meant, in any section; empty if none is similar."""
    known = list(known)
    last = name.rpartition(".")[2].replace("-", "_")
    if KEY_OF_OTHER_NAME.get(last) in known:
        return KEY_OF_OTHER_NAME[last]
    section = name.partition(".")[0]
    if own := [each for each in known if each == f"{section}.options.{last}"]:
        return own[0]
    # then without the section, which may be wrong or missing
    whole = {each: each for each in known} if "." in name else {}
    for words, word in ((whole, name.replace("-", "_")), ({each.rpartition(".")[2]: each for each in known}, last)):
        if near := nearest(word, words):
            return words[near]
    return ""
