"""Whether bigbatch launch takes what a sweep says of it, before anything is written or started."""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from bigbatch.errors import ConfigError
from bigbatch.launch import start as command
from bigbatch.launch.jobs.words import check_words
from bigbatch.launch.sweep.folder import SweepFolder
from bigbatch.launch.sweep.jobs import BIGBATCH, array_words, arrays, point_command
from bigbatch.launch.sweep.plan import Sweep
from bigbatch.launch.sweep.points import Point


def check_launch(sweep: Sweep, points: Sequence[Point], folder: SweepFolder) -> None:
    """A dry run of each number of ranks. Raises: ConfigError."""
    if sweep.where == "slurm":
        try:
            check_words("logs", str(folder.logs))
        except ConfigError as error:
            raise ConfigError(
                f"--folder {str(folder.path)!r}: Slurm's scripts take letters, digits and . _ / + @ = : - alone"
            ) from error
    for same in arrays(points).values():
        said = io.StringIO()
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(said):
                if sweep.where == "slurm":
                    words = array_words(sweep, same, folder, name=sweep.name)
                    command.job_script(command.slurm_job(words), folder=None)
                else:
                    words = point_command(sweep, same[0], folder)[len((*BIGBATCH, "launch")) :]
                    command.main([*words[: words.index("--")], "--dry-run", *words[words.index("--") :]])
        except SystemExit as error:  # argparse, whose last line says what is wrong
            raise ConfigError(f"launch: {said.getvalue().strip().rpartition('error: ')[2]}") from error
        except ConfigError as error:
            raise ConfigError(f"launch: {error}") from error
