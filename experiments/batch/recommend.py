"""`bigbatch tune batch`: a global batch for a config, from the gradient noise scale of a run."""

import argparse
import dataclasses
import shlex
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bigbatch.comm.rendezvous.environ import read_process_env, without_identity
from bigbatch.errors import INTERRUPTED, ConfigError, RunFolderError, TuneError, print_line
from bigbatch.experiments.batch.report import Answer, explain, plot_answer
from bigbatch.experiments.engine.launch_option import parse_launch
from bigbatch.interpreter import bigbatch_argv
from bigbatch.launch.jobs.foreground import run_in_foreground
from bigbatch.paths import as_path, expand_path
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.options import parse_beside_keys
from bigbatch.trainer.config.short_run import differences, shorten
from bigbatch.trainer.config.trust import TRUST
from bigbatch.trainer.folder.folder import RunDir, load_run_config, read_records
from bigbatch.trainer.report.noise_scale import FEWEST, measured
from bigbatch.words import whole

KEY = "run.noise_scale_every_steps"


def main(argv: Sequence[str]) -> int:
    """Train a config or read a run, as argv says, and recommend a batch; return the exit code.

    Raises: ConfigError; RunFolderError; TuneError if the training failed or measured too little, or in a rank of a job.
    """
    if (size := read_process_env().world_size) > 1:
        raise TuneError(f"bigbatch tune batch is one process, not {size}: start it alone, and give --launch")
    arguments, overrides = parse_beside_keys(_parser(), argv)
    if (arguments.epochs is None) != (arguments.out is None):
        raise ConfigError("--epochs and --out go together: both to train first, neither to read an existing run")
    if arguments.out is None:
        if overrides or arguments.launch:
            what = " ".join([*overrides, *(["--launch"] if arguments.launch else [])])
            raise ConfigError(f"{what}: an existing run cannot be changed; give --epochs N --out FOLDER to train")
        run = RunDir(Path(arguments.what))
        if not run.config.is_file():
            raise RunFolderError(
                f"{run.path} is not a run folder: to train a config first, give --epochs N --out FOLDER"
            )
    else:
        run = RunDir(arguments.out)
        if code := _train(short_run(arguments, overrides)):
            return code
    answer = read_answer(run)
    try:
        run.write_json(run.path / "batch.json", answer.record())
        if answer.rows:
            plot_answer(answer, run.path / "batch.png")
    finally:  # a run on a full or read-only disk still prints its answer
        for line in explain(answer):
            print_line(line)
    print_line(f"written into {run.path}: batch.json{' and batch.png' if answer.rows else ''}")
    return 0


def read_answer(run: RunDir) -> Answer:
    """Read a run's measurements. Raises: RunFolderError: not a run, or nothing measured; TuneError: too little."""
    config = load_run_config(run, [TRUST], prog="bigbatch tune batch")  # nothing is imported
    pairs = list(measured(read_records(run.metrics)))
    if not pairs:
        command = ["bigbatch", "train", "--config", str(run.path), "--run.directory", "FOLDER", f"--{KEY}", "1"]
        raise RunFolderError(
            f"{run.path} has no noise scale ({KEY}={config.run.noise_scale_every_steps}): record it by "
            f"{shlex.join(command)}, or by bigbatch tune batch {shlex.quote(str(run.path))} --epochs N --out FOLDER"
        )
    if len(pairs) < FEWEST:
        raise TuneError(
            f"{run.path} has {len(pairs)} measurements of the noise scale: {FEWEST} are needed, train longer"
        )
    if not any(square for _, square in pairs):
        raise TuneError(f"{run.path} had gradients of zero in all measurements, so it learns nothing: check its loss")
    return Answer(
        pairs,
        run=run.path,
        global_batch_size=config.batch.global_batch_size,
        microbatch_size=config.batch.microbatch_size,
        num_train=num_train(read_records(run.metrics)),
    )


def num_train(records: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the number of training images in the record of the run's last start; None if there is none."""
    jobs = [record.get("job") for record in records if record.get("kind") == "start"]
    found = [job.get("train_samples") for job in jobs if isinstance(job, dict)]
    counts = [count for count in found if type(count) is int and count > 0]
    return counts[-1] if counts else None


def short_run(arguments: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Return the command of a short run that measures the noise scale. Raises: ConfigError."""
    if arguments.epochs < 1:
        raise ConfigError(f"--epochs {arguments.epochs} must be at least 1")
    words = ["--config", arguments.what, *overrides]
    base = load_config(words, prog="bigbatch tune batch")
    launch = parse_launch(arguments.launch or "").words
    short = shorten(base, epochs=arguments.epochs, evaluate_each=False, directory=arguments.out)
    every = base.run.noise_scale_every_steps or 1
    short = dataclasses.replace(short, run=dataclasses.replace(short.run, noise_scale_every_steps=every))
    start = ["launch", *launch, "--", "train"] if launch else ["train"]
    return [*bigbatch_argv(), *start, *words, *differences(base, short)]


def _train(command: list[str]) -> int:
    """Train, and pass on requests to stop; return 130 if it was stopped. Raises: TuneError if it failed."""
    ended = run_in_foreground(command, environ=without_identity(), asks_to_stop=signal.SIGTERM)
    if ended.code not in (0, INTERRUPTED):
        raise TuneError(f"the training ended with exit code {ended.code}; its output is above")
    return ended.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch tune batch",
        usage="bigbatch tune batch RUN | bigbatch tune batch CONFIG --epochs N --out FOLDER [--launch WORDS] "
        "[--section.key VALUE ...]",
        description="Recommend a global batch from the gradient noise scale: of a run that measured it "
        f"({KEY}), or of a short run that is trained first. Leaves batch.json and batch.png in the run's folder.",
        epilog="example: bigbatch tune batch quickstart --epochs 6 --out runs/batch",
        allow_abbrev=False,
    )
    add = parser.add_argument
    what = "run folder; with --out a YAML file or the name of a packaged experiment"
    add("what", type=expand_path, metavar="RUN | CONFIG", help=what)
    add("--epochs", type=whole, metavar="N", help="epochs of the training; its schedule shrinks in proportion")
    add("--out", type=as_path, metavar="FOLDER", help="run folder of that training")
    add("--launch", metavar="WORDS", help="words of bigbatch launch, such as 'mpirun --ranks 8' (default: one process)")
    return parser
