"""Rank 0's output: terminal, metrics, plot and summary."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.errors import tell
from bigbatch.parts import load
from bigbatch.trainer.checkpoint.checkpoint import (
    best_checkpoint,
    list_checkpoints,
    require_free_disk,
    set_aside_after,
    set_damaged_aside,
)
from bigbatch.trainer.checkpoint.rank_memory import checkpoint_bytes
from bigbatch.trainer.checkpoint.resume import ResumePoint, changes
from bigbatch.trainer.checkpoint.sums import describe_sums, sums_notes
from bigbatch.trainer.config.dotted import names_list
from bigbatch.trainer.config.file import dump_config, read_dumped
from bigbatch.trainer.config.optimizer import CROSS_ENTROPY
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir, read_curves, read_records, read_summary, writing
from bigbatch.trainer.report.cost import total_spent
from bigbatch.trainer.report.loggers import find_loggers, open_loggers
from bigbatch.trainer.report.metrics import MetricsLog
from bigbatch.trainer.report.progress import Reporter, describe_evaluation, make_reporter
from bigbatch.trainer.report.summary import Ending, make_hints, make_summary
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.window import Totals


class RunOutput:
    """Writes rank 0's output: to the terminal at once, and to the run folder after open_folder.

    If the reader of standard output has ended, it prints that on standard error, calls ask_to_stop and prints nothing
    more; the run still saves everything.
    """

    def __init__(
        self,
        config: Config,
        communicator: Communicator,
        *,
        plan: Plan,
        env: ProcessEnv,
        ask_to_stop: Callable[[str], None],
        log: MetricsLog,
        is_quiet: bool = False,
    ) -> None:
        """log: of the run folder; loggers that are open stay open."""
        self._config, self._plan, self._communicator = config, plan, communicator
        self._ask_to_stop = ask_to_stop
        self._loggers = find_loggers(config)  # on all ranks, which refuse alike
        self._rundir = RunDir(Path(config.run.directory))
        self._log = log
        self.log, self.close = log.write, log.close
        self._reporter: Reporter | None = None
        if communicator.rank == 0 and not is_quiet:
            with self._speaking():
                self._reporter = make_reporter(
                    terminal_columns=env.terminal_columns,
                    is_notebook=env.is_notebook,
                    first_step=plan.first_step,
                    num_steps=plan.num_steps,
                )

    def open_folder(self, parts: Parts, start: ResumePoint) -> None:
        """Write the files that precede the first step. Raises: CheckpointError; RunFolderError."""
        config, rundir, plan = self._config, self._rundir, self._plan
        # readers would take a record for another start, and new settings for those of the results
        is_finished = (steps := plan.num_steps - plan.first_step) <= 0 and rundir.summary.exists()
        if not is_finished:
            num_written = 2 + steps // plan.eval_every_steps + steps // (plan.checkpoint_every_steps or steps + 1)
            on_disk = sum(each.step <= plan.first_step for each in list_checkpoints(rundir.checkpoints))
            num_kept = config.run.keep_checkpoints + 2  # plus the best one and the one being written
            num_new = max(1, min(num_kept - on_disk, num_written))
            require_free_disk(rundir.checkpoints, num_bytes=checkpoint_bytes(config, parts) * num_new)
        text = dump_config(config)
        if start.config or start.sums:
            self._say_changes(parts, start, text, is_finished=is_finished)
        if config.data.loader != "synthetic" and (config.data.list or names_list(config.data.root)):
            self._keep_list(start)
        if not is_finished:
            rundir.write_text(rundir.config, text)
        with writing(rundir.checkpoints):
            damaged = {set_damaged_aside(path): why for path, why in start.damaged.items()}
            abandoned = set_aside_after(rundir.checkpoints, step=self._plan.first_step)
        for path, why in damaged.items():
            self.say(f"{why}: set aside as {path}, and the run continues from {start.path}")
        for path in abandoned:
            self.say(f"set aside as {path}: the run continues from an older checkpoint")
        if is_finished:
            return
        with writing(rundir.summary):
            rundir.summary.unlink(missing_ok=True)  # it marks a finished run, and this one has steps left
        self._log.begin(from_step=self._plan.first_step, evaluates_again=start.is_of_other_val)
        if not self._log.loggers:
            self._log.loggers = open_loggers(
                self._loggers, config, rundir, from_step=self._plan.first_step, say=self.say
            )
        for logger in self._log.loggers:
            logger.say = self.say
        for path, why in damaged.items():
            self.log("damaged", {"step": self._plan.first_step, "set_aside": str(path), "reason": why})

    def _say_changes(self, parts: Parts, start: ResumePoint, text: str, *, is_finished: bool) -> None:
        """Say what a resumed run changes: values of the config, whose text this is, and how gradients are summed."""
        config = self._config
        if start.config and (changed := changes(start.config, text)):
            settings = ", ".join(f"{key}={value}" for key, value in changed.items())
            if is_finished:
                self.say(f"this run is finished and keeps its settings: choose another run.directory for {settings}")
            else:
                self.say(f"resuming with a changed config: {settings}")
        if start.sums and not config.run.reproducible:
            now = describe_sums(self._communicator, parts.reducer.plan, is_sharded=config.optimizer.sharded)
            for line in sums_notes(start.sums, now):
                self.say(line)

    def _keep_list(self, start: ResumePoint) -> None:
        config, folder = self._config, self._rundir.path
        before = read_dumped(start.config) if start.config and config.run.resume == "auto" else {}
        was_listed = bool(before.get("data.list")) or names_list(before.get("data.root", ""))
        with writing(folder):
            keep_list = load("bigbatch.trainer.input.listed.keep_list")
            keep_list(config.data, folder, is_resumed=start.step > 0, was_listed=was_listed)

    def say(self, text: str) -> None:
        self._show(lambda reporter: reporter.say(text))

    def hint(self, text: str, *, step: int) -> None:
        self.say(text)
        self.log("hint", {"step": step, "hint": text})

    def report(self, record: dict[str, Any]) -> None:
        self._show(lambda reporter: reporter.advance(record))
        self.log("train", record)

    def evaluated(self, record: dict[str, Any]) -> None:
        found = describe_evaluation(record, num_classes=self._config.data.num_classes)
        self.say(f"epoch {record['epoch']:6.2f}  {found}")
        may_repeat = self._communicator.rank == 0 and record["step"] == self._plan.first_step
        kept = read_records(self._rundir.metrics) if may_repeat else ()
        if not any((each["kind"], each.get("step")) == ("eval", record["step"]) for each in kept):
            self.log("eval", record)

    def finish(self, totals: Totals, ending: Ending, *, schedule: Callable[[int], float]) -> dict[str, Any] | None:
        """Write the plot, and the summary or how to continue; return the summary.

        totals: of this run. schedule: learning rate by step.
        """
        config, rundir = self._config, self._rundir
        title = f"{config.model.name}, global batch {config.batch.global_batch_size}"
        optimizer = config.optimizer
        load("bigbatch.trainer.report.plot.plot_run")(
            read_curves(rundir.metrics),
            rundir.plot,
            title=title,
            label_smoothing=optimizer.label_smoothing,
            loss="cross-entropy (nats)" if optimizer.loss == CROSS_ENTROPY else optimizer.loss,
            global_batch_size=config.batch.global_batch_size,
            schedule=schedule,
        )
        host_of, used_share = self._communicator.connection.control.host_of, self._plan.division.used_share
        whole = ending.job.total(totals)
        for text in make_hints(
            whole, config, measured=ending.measured, host_of=host_of, used_share=used_share, is_healed=ending.is_healed
        ):
            self.hint(text, step=self._plan.first_step + totals.steps)
        if totals.stopped_by:
            where = "nothing is saved yet: the same command starts again"  # before the first step
            for newest in list_checkpoints(rundir.checkpoints)[-1:]:
                where = f"saved {newest.path}; the same command continues from there"
            self.say(f"stopped by {totals.stopped_by}; {where}")
            return None
        if totals.steps == 0 and rundir.summary.exists():
            self.say("this run was finished before; its summary:")
            summary = read_summary(rundir)
        else:
            summary = make_summary(
                totals,
                config,
                ending,
                communicator=self._communicator,
                plan=self._plan,
                best=best_checkpoint(list_checkpoints(rundir.checkpoints)),
                spent=total_spent(read_records(rundir.metrics)),
            )
            rundir.write_json(rundir.summary, summary)
        self.leave_terminal()
        closing_lines = load("bigbatch.trainer.report.ending.closing_lines")
        for line in closing_lines(summary, self._rundir.path, num_classes=self._config.data.num_classes):
            self.say(line)
        return dict(summary)

    def leave_terminal(self) -> None:
        """Release the terminal before the end of the run, which may take long or fail."""
        self._show(lambda reporter: reporter.close())

    def _show(self, show: Callable[[Reporter], object]) -> None:
        if self._reporter:
            with self._speaking():
                show(self._reporter)

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._stop_speaking(error)

    def _stop_speaking(self, error: OSError) -> None:
        lost, self._reporter = self._reporter, None
        # discard buffered output at exit: its reader is gone
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        with suppress(OSError):
            if lost:
                lost.close()
            tell(f"standard output cannot be written any more ({error.strerror}): the run saves a checkpoint and stops")
        self._ask_to_stop("its standard output, which has no reader")
