"""Command line for trained weights: a run folder, or an experiment and a file of weights."""

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import CheckpointError, tell
from bigbatch.parts import load
from bigbatch.paths import as_path, expand_path
from bigbatch.trainer.checkpoint.checkpoint import best_or_newest, list_checkpoints
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.options import parse_beside_keys
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import SCALED
from bigbatch.trainer.config.trust import TRUST, TRUST_HELP
from bigbatch.trainer.folder.folder import RunDir, read_summary
from bigbatch.words import count, is_number

FINISHED_RUNS = "bigbatch.experiments.engine.folder.finished_runs"


def trained_parser(prog: str, *, description: str, others: str = "") -> ArgumentParser:
    """Return a parser of trained weights for read_trained; others: names of further arguments, such as IMAGE ..."""
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} (RUN [--checkpoint FOLDER] | --config NAME_OR_FILE --weights FILE){others and ' ' + others} "
        f"[{TRUST}] [--section.key VALUE ...]",
        description=f"{description} Any key of the config can be overridden, such as --data.root or "
        f"--batch.microbatch_size. {TRUST}: {TRUST_HELP}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=as_path, nargs="?", metavar="RUN", help="run folder, or that of a sweep: its best run"
    )
    parser.add_argument("--checkpoint", type=as_path, help="another checkpoint of RUN than the best")
    parser.add_argument(
        "--config", type=expand_path, help="without a run folder: the experiment, such as imagenet/resnet50_8k"
    )
    parser.add_argument("--weights", type=as_path, help="weights for --config: a file as for model.weights")
    parser.set_defaults(others=[] if others else None)
    return parser


def read_trained(
    parser: ArgumentParser,
    argv: Sequence[str],
    *,
    imports: Collection[str] = ("model.name",),
) -> tuple[Namespace, Config, Path]:
    """Return the parsed command line, the config and the path of the weights. imports: as for load_config.

    Raises: CheckpointError; RunFolderError; ConfigError; SystemExit for an illegal command line.
    """
    arguments, overrides = parse_beside_keys(parser, argv)
    if arguments.others is not None:
        # no positionals of argparse: it would assign words to RUN or these by their place before an option
        arguments.others = [as_path(word) for word in overrides if not word.startswith("--")]
        overrides = [word for word in overrides if word.startswith("--")]
        if arguments.config is not None and arguments.run is not None:
            arguments.others.insert(0, arguments.run)
            arguments.run = None
    # the added words come first: if a key is stated twice, the last word counts
    overrides = [*_without_limits_of_training(overrides), *overrides]
    if arguments.run is None:
        if arguments.config is None or arguments.weights is None:
            parser.error("name a run folder, or --config and --weights")
        if arguments.checkpoint is not None:
            parser.error("--checkpoint is one of a run folder: name that, or give --weights instead")
        arguments.words = ["--config", arguments.config, *overrides]
        return arguments, load_config(arguments.words, prog=parser.prog, imports=imports), arguments.weights
    if arguments.config is not None or arguments.weights is not None:
        parser.error(f"{arguments.run} has a config and weights: leave out --config and --weights, or the run folder")
    if (arguments.run / "sweep.yaml").is_file():
        arguments.run = _best_run(arguments.run)
    rundir = RunDir(arguments.run)
    arguments.words = ["--config", str(rundir.require_config()), *overrides]
    config = load_config(arguments.words, prog=parser.prog, is_run=True, imports=imports)
    if arguments.checkpoint is not None:
        return arguments, config, arguments.checkpoint
    return arguments, config, best_or_newest(rundir.checkpoints, remedy="give --checkpoint")


def _best_run(sweep: Path) -> Path:
    """Return the finished run of a sweep with the highest top-1 in its last evaluation, as in a report.

    The first rank prints it. Raises: CheckpointError if no run is finished and has a checkpoint; RunFolderError.
    """
    runs: list[RunDir] = [run for run in load(FINISHED_RUNS)(sweep) if list_checkpoints(run.checkpoints)]
    best = ((read_summary(run).get("top1"), run.path) for run in runs)
    found = [(float(top1), path) for top1, path in best if top1 is not None and is_number(top1)]
    if not found:
        raise CheckpointError(f"{sweep} is a sweep without a finished run that has a checkpoint: name a run folder")
    top1, best_run = max(found, key=lambda each: each[0])
    if read_process_env().rank == 0:
        best_of = f"the best of {count(len(found), 'finished run')}"
        tell(f"{best_run}: {best_of}, top-1 {100 * top1:.2f}% in its last evaluation")
    return best_run


def _without_limits_of_training(overrides: Sequence[str]) -> Iterator[str]:
    """Yield options that fit keys of training only (batch, loss scale) to the stated microbatch and precision."""
    given = dict(word.partition("=")[::2] for word in overrides)
    if size := given.get("--batch.microbatch_size"):
        yield from (f"--batch.global_batch_size={size}", f"--batch.bn_span={size}", "--batch.virtual_ranks=null")
        yield from ("--augment.mixup_alpha=0", "--augment.cutmix_alpha=0")
    if precision := given.get("--optimizer.precision"):
        yield f"--optimizer.loss_scale={1 if precision in SCALED else 'null'}"
        yield "--optimizer.loss_scale_growth_steps=null"
