"""`bigbatch tune precision`: recommend a precision and a loss scale by the gradients of a few fp32 steps."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import ConfigError, print_lines
from bigbatch.paths import as_path, expand_path
from bigbatch.tools.tune.precision.steps import FP16_LEAST, FP16_NORMAL, Gradients, Magnitudes, count_gradients
from bigbatch.trainer.build.job import bind_rank, join_job
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.moved import require_own_list
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import OptimizerConfig
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.trainer.folder.folder import RunDir, require_writable
from bigbatch.trainer.folder.ownership import write_on_first
from bigbatch.trainer.step.stop_request import Stopped, leave_stopped
from bigbatch.words import count, whole

STEPS = 8
POWERS = range(25)
"""Exponents of the loss scales that a config may state: 1 to 2^24."""
TOLERANCE = 0.001
"""Largest excess over the least underflow, and largest share of lost gradients, as shares of the values."""
MIN_DOUBLINGS = 3
"""Fewest doublings of the gradients that must fit before they overflow."""
SAFE_DOUBLINGS = 8
"""Doublings that allow a static scale: a warm-up and a falling loss change gradients by less."""

TABLE_HEAD = f"""\
underflow: 0, or below 2^{FP16_NORMAL} and so short of digits; lost: not 0 in fp32, but below 2^{FP16_LEAST} in fp16
            gradients of weights         gradients of activations      may grow
loss scale  underflow    lost  overflow  underflow    lost  overflow    (times)"""


def scale_records(found: Gradients) -> list[dict[str, Any]]:
    """Return, for each loss scale, the shares of gradients that fp16 cannot hold, and the doublings that fit."""
    kinds = {"weights": found.weights, "activations": found.activations}
    return [
        {
            "loss_scale": 2.0**power,
            **{
                f"{name}_{share.__name__}": share(kind, scale_power=power)
                for name, kind in kinds.items()
                for share in (Magnitudes.underflow, Magnitudes.lost, Magnitudes.overflow)
            },
            "doublings": min(kind.headroom(scale_power=power) for kind in kinds.values()),
        }
        for power in POWERS
    ]


def choose_scale(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the record of the smallest loss scale with about the least underflow; None if no scale leaves room.

    Each kind is compared with its own least underflow: half of the activations may be 0 at any scale.
    """
    allowed = [record for record in records if record["doublings"] >= MIN_DOUBLINGS]
    keys = ("weights_underflow", "activations_underflow")
    # underflow falls as the scale rises: the largest scale has the least
    return next((each for each in allowed if all(each[key] <= allowed[-1][key] + TOLERANCE for key in keys)), None)


def recommend(records: Sequence[dict[str, Any]], config: Config) -> tuple[dict[str, Any], str]:
    """Return the recommended values by dotted key, and the reason.

    fp16 has three bits more than bf16, so it is preferred if it holds the gradients. A config with autocast keeps it.
    """
    best, form = choose_scale(records), "_autocast" if config.optimizer.precision.endswith("_autocast") else ""
    lost = max(best["weights_lost"], best["activations_lost"]) if best else 0.0
    precision, scale, growth_steps = "bf16", None, None
    if best is None:
        reason = f"no loss scale leaves fp16 gradients room to grow {2**MIN_DOUBLINGS} times"
    elif lost > TOLERANCE:
        reason = f"fp16 makes {lost:.2%} of the gradients 0 even at loss scale {best['loss_scale']:.0f}"
    else:
        precision, scale = "fp16", best["loss_scale"]
        reason = f"the smallest loss scale with the least underflow; gradients may grow {2 ** best['doublings']} times"
        if best["doublings"] < SAFE_DOUBLINGS:
            growth_steps = config.optimizer.loss_scale_growth_steps or OptimizerConfig.loss_scale_growth_steps
            reason += ", too little for a static scale"
    values = {"precision": precision + form, "loss_scale": scale, "loss_scale_growth_steps": growth_steps}
    return {f"optimizer.{name}": value for name, value in values.items()}, reason


def table_lines(records: Sequence[dict[str, Any]], *, chosen: float | None) -> Iterator[str]:
    """Yield the table of some loss scales, with the chosen one."""
    yield TABLE_HEAD
    for power, record in enumerate(records):
        scale, *shares, doublings = record.values()
        if power % 4 == 0 or scale == chosen:
            cells = "  ".join(f"{share:>{width}.2%}" for share, width in zip(shares, (9, 6, 8) * 2, strict=True))
            grows = "overflows" if doublings < 0 else f"{2**doublings}"
            yield f"{scale:>10.0f}  {cells}  {grows:>9}{'  recommended' if scale == chosen else ''}"


def main(argv: Sequence[str]) -> int:
    """Measure and recommend as argv states; return the exit code. Collective over the job's ranks.

    Raises: ConfigError; TuneError if a gradient is not finite in fp32.
    """
    arguments, overrides = _parser().parse_known_args(argv)
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps} must be 1 or more")
    words = ["--config", arguments.config, *overrides]
    config = require_own_list(load_config(words, prog="bigbatch tune precision"), words)
    env = read_process_env()
    accumulation_steps(config.batch, world_size=env.world_size)
    if arguments.dry_run:
        work = f"{count(arguments.steps, 'step')} of {config.batch.global_batch_size} images in fp32"
        print_lines(f"would train {work} and write {arguments.out}/precision.json")
        return 0
    bind_rank(config, env)
    communicator, _ = join_job(config, env)
    communicator.agree("the number of steps", str(arguments.steps))
    timeout_seconds = config.run.checkpoint_timeout_seconds
    on_first = partial(
        write_on_first, control=communicator.connection.control, what="precision.json", timeout_seconds=timeout_seconds
    )
    on_first(partial(require_writable, arguments.out))
    say: Callable[[str], None] = print_lines if communicator.rank == 0 else lambda text: None
    try:
        found = count_gradients(config, communicator, num_steps=arguments.steps, say=say)
    except Stopped as stopped:
        say(f"stopped by {stopped}; nothing was written")
        communicator.close()
        return leave_stopped(env)
    records = scale_records(found)
    values, reason = recommend(records, config)
    # print before writing: a full disk must not lose the result
    say("\n".join(table_lines(records, chosen=values["optimizer.loss_scale"])))
    options = [word for key, value in values.items() for word in (f"--{key}", as_yaml(value))]
    command = ["bigbatch", "train", "--config", arguments.config, *overrides, *options]
    say(f"recommended: {reason}\n  {shlex.join(command)}")
    found_json = {"recommended": values, "reason": reason, "loss_fp32": found.losses, "loss_scales": records}
    folder = RunDir(arguments.out)
    on_first(partial(folder.write_json, folder.path / "precision.json", found_json))
    communicator.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch tune precision",
        usage="bigbatch tune precision --config NAME --out FOLDER [--steps N] [--dry-run] [--section.key VALUE ...]",
        description="Train a config for a few steps in fp32, count its gradients by size, and recommend a precision "
        "and a loss scale by their underflow and overflow in fp16. Runs as one rank of a job.",
        epilog="example: bigbatch tune precision --config quickstart --optimizer.precision fp16 --out runs/precision",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=expand_path, required=True, help="YAML file, or name of a packaged experiment")
    add("--out", type=as_path, required=True, metavar="FOLDER", help="folder for precision.json")
    add("--steps", type=whole, default=STEPS, metavar="N", help=f"updates in fp32 (default: {STEPS})")
    add("--dry-run", action="store_true", help="describe the training, and end")
    return parser
