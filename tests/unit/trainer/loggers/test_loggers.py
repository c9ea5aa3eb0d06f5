"""TensorBoard, and Weights & Biases and MLflow by packages that play them: what each gets; none ends a run."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from small_run import PLAN
from tiny_training import TINY

from bigbatch.cli import main
from bigbatch.errors import ConfigError
from bigbatch.parts import load
from bigbatch.trainer.config.checks import LOGGERS
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.folder.folder import RunDir, read_records
from bigbatch.trainer.in_python import train
from bigbatch.trainer.loggers import wandb
from bigbatch.trainer.report import loggers as background
from bigbatch.trainer.report import output as output_module
from bigbatch.trainer.report.loggers import BackgroundLogger, find_loggers, open_loggers
from bigbatch.trainer.report.metrics import MetricsLog
from bigbatch.trainer.report.output import RunOutput


class PlayedWandb(ModuleType):
    """Has as much of wandb as we call; init fails a stated number of times, and log always if stated."""

    def __init__(
        self, *, failing_inits: int = 0, log: Callable[[], object] = lambda: None, disabled: bool = False
    ) -> None:
        super().__init__("wandb")
        self.failing_inits, self._log, self.disabled = failing_inits, log, disabled
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.finished = 0

    def Settings(self, **settings: object) -> dict[str, object]:
        return settings

    def setup(self, settings: Mapping[str, object]) -> None:
        assert settings == {"console": "off", "silent": True, "init_timeout": wandb.REACH_SECONDS}

    def init(self, **arguments: Any) -> Any:
        self.inits.append(arguments)
        if len(self.inits) <= self.failing_inits:
            raise ConnectionError("no route to host\nin detail")
        folder = Path(arguments["dir"]) / "wandb/run-1/files"
        return SimpleNamespace(
            id=arguments["id"],
            dir=str(folder),
            offline=arguments.get("mode") == "offline",
            disabled=self.disabled,
            url="https://wandb.invalid/run",
            define_metric=lambda name, *, step_metric: None,
            log=self.log,
            finish=self.finish,
        )

    def log(self, figures: dict[str, float]) -> None:
        self._log()
        self.logged.append(figures)

    def finish(self) -> None:
        self.finished += 1


def play(monkeypatch: pytest.MonkeyPatch, played: PlayedWandb) -> PlayedWandb:
    monkeypatch.setitem(sys.modules, "wandb", played)
    return played


def open_logger(
    name: str,
    rundir: RunDir,
    say: Callable[[str], object],
    *,
    stated: Mapping[str, Any] = MappingProxyType({}),
    from_step: int = 0,
) -> BackgroundLogger:
    return BackgroundLogger(name, partial(load(LOGGERS[name]), rundir, stated=stated, from_step=from_step), say=say)


def send(rundir: RunDir, *, name: str = "wandb", from_step: int = 0, **stated: Any) -> list[str]:
    """Open a logger as a run does, send a report and an evaluation, and close it; what was said."""
    said: list[str] = []
    logger = open_logger(name, rundir, said.append, stated={"run": {"seed": 3}, **stated}, from_step=from_step)
    logger.write("train", from_step + 1, {"loss": 2.5, "rate": math.nan} if name == "mlflow" else {"loss": 2.5})
    logger.write("eval", from_step + 1, {"top1": 0.5})
    logger.close()
    return said


def test_loggers_tensorboard_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # it numbers the files of one second, and would read number 10 before number 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    for from_step, losses in ((0, (4.0, 3.0, 2.0)), (2, (1.0,))):
        board = open_logger("tensorboard", RunDir(tmp_path), pytest.fail, from_step=from_step)
        for step, loss in enumerate(losses, start=from_step + 1):
            board.write("train", step, {"loss": loss})
        board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 4.0), (2, 3.0), (3, 1.0)]


def test_loggers_steps_do_not_wait_for_the_import_of_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks would wait with them after the loss of rank 0: the next first rank imports it."""
    is_imported, written = threading.Event(), []

    class Slow(ModuleType):
        def __getattr__(self, name: str) -> Any:
            assert is_imported.wait(60)
            add = lambda *scalar: written.append(scalar)  # noqa: E731
            return lambda folder, *, purge_step: SimpleNamespace(add_scalar=add, close=lambda: written.append("closed"))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Slow("torch.utils.tensorboard"))
    board = open_logger("tensorboard", RunDir(tmp_path), pytest.fail)
    board.write("train", 1, {"loss": 2.5})
    assert not written
    is_imported.set()
    board.close()
    assert written == [("train/loss", 2.5, 1), "closed"]


def test_loggers_tensorboard_that_cannot_write_leaves_no_traceback_of_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    said: list[str] = []
    for number in range(2):
        rundir, deadline = RunDir(tmp_path / "gone"), time.monotonic() + 60
        board = open_logger("tensorboard", rundir, said.append)
        while not list(rundir.path.glob("tensorboard/events*")):
            assert time.monotonic() < deadline, "its thread opens it"
            time.sleep(0.01)
        rundir.path.rename(tmp_path / f"moved to {number}")  # in one step: its thread writes meanwhile
        while len(said) == number:
            board.write("train", 1, {"loss": 2.5})
            assert time.monotonic() < deadline, "its thread ends by what it met"
            time.sleep(0.01)
        board.write("train", 2, {"loss": 2.5})
        board.close()
    assert not reported
    assert len(said) == 2
    assert all(naming_all(text, "tensorboard failed", "No such file") for text in said)
    other = threading.Thread(target=lambda: 1 / 0)
    other.start()
    other.join()
    assert [args.thread for args in reported] == [other], "what ends other threads is still told"


def test_loggers_stay_open_for_the_run_that_goes_on_after_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed, they could hold the other ranks up for a minute; their news go to the new run's terminal."""
    made: list[Any] = []
    is_sent = threading.Event()

    def open_session(tell: Callable[[str], None]) -> Any:
        def log(step: int, figures: Mapping[str, float]) -> None:
            tell(f"step {step}")
            is_sent.set()

        return SimpleNamespace(log=log, finish=lambda: tell("closed"))

    def open_it(*_: object, say: Callable[[str], None], **__: object) -> list[BackgroundLogger]:
        made.append(say)
        return [BackgroundLogger("first", open_session, say=say)]

    monkeypatch.setattr(output_module, "open_loggers", open_it)
    monkeypatch.setattr(RunOutput, "say", lambda output, text: said.append((output._plan.first_step, text)))
    said: list[tuple[int, str]] = []
    config = load_config(["--config", "quickstart", f"--run.directory={tmp_path}", "--run.reproducible=true"])
    monkeypatch.setattr(output_module, "checkpoint_bytes", lambda config, parts: 0)
    communicator: Any = SimpleNamespace(rank=0)
    start: Any = SimpleNamespace(config=None, damaged={}, path=None, sums=None, is_of_other_val=False)
    log = MetricsLog(RunDir(tmp_path))
    for first_step in (0, 3, 5):
        plan = replace(PLAN, first_step=first_step, num_steps=9)
        options: Any = {"plan": plan, "env": None, "ask_to_stop": None, "is_quiet": True, "log": log}
        output = RunOutput(config, communicator, **options)
        if first_step != 3:  # that one ends before its first step
            output.open_folder(None, start)  # type: ignore[arg-type]
            output.log("train", {"step": first_step + 1, "loss": 1.0})
            assert is_sent.wait(60)
    output.close()
    assert said == [(5, "step 1"), (5, "step 6"), (5, "closed")]
    assert [record["step"] for record in read_records(RunDir(tmp_path).metrics)] == [1, 6]
    assert len(made) == 1
    output.open_folder(None, start)  # type: ignore[arg-type]
    assert len(made) == 2, "after a return to a checkpoint they are opened again"


def test_loggers_wandb_gets_config_and_figures_and_a_resumed_run_goes_on_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path / "night")
    rundir.path.mkdir()
    played = play(monkeypatch, PlayedWandb())
    monkeypatch.setenv("WANDB_PROJECT", "imagenet")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for from_step in (0, 7, 0):
        said = send(rundir, from_step=from_step)
        assert len(said) == 1
        assert naming_all(said[0], "wandb sync", rundir.path / "wandb/run-1")
    first, resumed, fresh = played.inits
    assert first["id"] == resumed["id"] != fresh["id"]
    for call in played.inits:
        assert call["project"] == "imagenet"
        assert (call["name"], call["config"], call["resume"]) == ("night", {"run": {"seed": 3}}, "allow")
    assert played.logged[2:4] == [{"step": 8, "train/loss": 2.5}, {"step": 8, "eval/top1": 0.5}]
    assert played.finished == 3


def naming_all(text: str, *parts: object) -> bool:
    return all(str(part) in text for part in parts)


def test_loggers_wandb_without_network_is_logged_offline_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = play(monkeypatch, PlayedWandb(failing_inits=1))
    said = send(RunDir(tmp_path))
    assert [call.get("mode") for call in played.inits] == [None, "offline"]
    assert len({call["id"] for call in played.inits}) == 2, "wandb takes the first for in use"
    assert len(said) == 2, "what happened, and where the records are"
    assert naming_all(said[0], "no route to host", "the run continues")
    assert "detail" not in said[0]
    assert len(played.logged) == 2
    play(monkeypatch, PlayedWandb(disabled=True))
    (said,) = send(RunDir(tmp_path))
    assert naming_all(said, "wandb", "disabled", "WANDB_MODE")


def test_loggers_wandb_resumes_the_run_of_before_after_a_start_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir, ids = RunDir(tmp_path), []
    for from_step, failing_inits in ((0, 0), (7, 1), (9, 0)):
        played = play(monkeypatch, PlayedWandb(failing_inits=failing_inits))
        send(rundir, from_step=from_step)
        ids.append(played.inits[-1]["id"])
    assert ids[0] == ids[2] != ids[1]


@pytest.mark.parametrize(
    ("played", "mode", "named"),
    [
        (PlayedWandb(failing_inits=1), "offline", "no route to host"),
        (PlayedWandb(log=lambda: math.sqrt(-1)), "online", "math domain"),
        (PlayedWandb(log=lambda: sys.exit("out of here")), "online", "out of here"),
    ],
)
def test_loggers_wandb_that_fails_is_said_once(
    played: PlayedWandb, mode: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, played)
    monkeypatch.setenv("WANDB_MODE", mode)
    failures = [text for text in send(RunDir(tmp_path)) if "failed" in text]
    assert len(failures) == 1
    assert naming_all(failures[0], "run.loggers", "wandb", named, "continues without it")


def test_loggers_wandb_that_hangs_holds_neither_steps_nor_the_end_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CLOSE_SECONDS", 0.01)
    play(monkeypatch, PlayedWandb(log=lambda: time.sleep(0.5)))
    said = send(RunDir(tmp_path))
    assert naming_all(said[-1], "wandb failed", "0.01 s after the run's end")


def test_loggers_end_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed one after another, their limits would add up."""
    monkeypatch.setattr(background, "CLOSE_SECONDS", 5.0)
    has_ended, log = threading.Event(), MetricsLog(RunDir(tmp_path))
    for finish in (has_ended.wait, has_ended.set):
        session = SimpleNamespace(finish=finish)
        log.loggers.append(BackgroundLogger("one", lambda _, session=session: session, say=pytest.fail))
    log.close()
    assert has_ended.is_set()


@pytest.mark.parametrize(
    "broken", [None, "", "raise TypeError('Descriptors cannot be created directly')", "def ("], ids=repr
)
def test_loggers_without_the_extra_are_said_once_and_leave_the_others(
    broken: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing; a folder of that name, which has no init; and two that do not import."""
    if broken is not None:
        (tmp_path / "wandb.py").write_text(broken)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    if broken is None:
        monkeypatch.setitem(sys.modules, "wandb", None)
    said: list[str] = []
    config = load_config(["--config", "quickstart", "--run.loggers=[wandb]"])
    rundir = RunDir(tmp_path / "run")
    log = MetricsLog(rundir)
    log.begin(from_step=0)
    log.loggers = open_loggers(find_loggers(config), config, rundir, from_step=0, say=said.append)
    for step in (1, 2):
        log.write("train", {"step": step, "loss": 2.0})
    log.close()
    (told,) = said
    assert naming_all(told, "run.loggers: wandb failed", "cannot be imported", "pip install -e '.[wandb]'")
    assert "the run continues without it" in told
    assert [record["step"] for record in read_records(rundir.metrics)] == [1, 2]


def send_to_mlflow(rundir: RunDir, *, from_step: int = 0) -> list[str]:
    stated = {"run": {"seed": 3, "metrics": {}}, "model": {"name": "resnet9"}}
    return send(rundir, name="mlflow", from_step=from_step, **stated)


class PlayedMlflow(ModuleType):
    """Has as much of MlflowClient as we call, with its arguments' names; log_batch fails if stated."""

    def __init__(self, *, log: Callable[[], object] = lambda: None) -> None:
        super().__init__("mlflow")
        self._log, self.calls = log, []  # type: ignore[var-annotated]
        self.entities = ModuleType("mlflow.entities")
        self.entities.Metric = lambda key, value, timestamp, step: (key, value, step)  # type: ignore[attr-defined]
        self.entities.Param = lambda key, value: (key, value)  # type: ignore[attr-defined]

    def MlflowClient(self, *, tracking_uri: str) -> "PlayedMlflow":
        self.calls.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=f"of {name}")

    def create_run(self, experiment_id: str, *, run_name: str) -> Any:
        self.calls.append((experiment_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="run7"))

    def update_run(self, run_id: str, *, status: str) -> None:
        self.calls.append((run_id, status))

    def log_batch(self, run_id: str, *, metrics: Any = (), params: Any = ()) -> None:
        self._log()
        self.calls.append((run_id, *metrics, *params))

    def set_terminated(self, run_id: str) -> None:
        self.calls.append((run_id, "ended"))


def play_mlflow(monkeypatch: pytest.MonkeyPatch, played: PlayedMlflow) -> PlayedMlflow:
    monkeypatch.setitem(sys.modules, "mlflow", played)
    monkeypatch.setitem(sys.modules, "mlflow.entities", played.entities)
    for name in ("TRACKING_URI", "EXPERIMENT_NAME", "RUN_NAME"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return played


def test_loggers_mlflow_gets_config_and_figures_and_a_resumed_run_goes_on_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = play_mlflow(monkeypatch, PlayedMlflow())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.invalid")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "night")
    rundir = RunDir(tmp_path / "fast")
    rundir.path.mkdir()
    (told,) = send_to_mlflow(rundir)
    assert naming_all(told, "run7", "night", "https://mlflow.invalid")
    send_to_mlflow(rundir, from_step=4)
    uri, made, params, train, evaluation, ended, *resumed = played.calls
    assert (uri, made) == ("https://mlflow.invalid", ("of night", "fast"))
    assert params == ("run7", ("run.seed", "3"), ("run.metrics", "{}"), ("model.name", "resnet9"))
    assert (train[1], evaluation, ended) == (("train/loss", 2.5, 1), ("run7", ("eval/top1", 0.5, 1)), ("run7", "ended"))
    assert resumed[:2] == ["https://mlflow.invalid", ("run7", "RUNNING")]
    assert resumed[-2] == ("run7", ("eval/top1", 0.5, 5))


def test_loggers_without_mlflow_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.invalid")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    (told,) = send_to_mlflow(RunDir(tmp_path))
    assert naming_all(told, "run.loggers: mlflow failed", "pip install -e '.[mlflow]'", "continues without it")


OWN = """
import json

class Csv:
    def __init__(self, folder, *, config, from_step):
        self.file = open(folder / "own.csv", "w")
        print(config["model"]["name"], from_step, file=self.file)

    def log(self, step, figures):
        print(step, *sorted(figures), file=self.file)

    def finish(self):
        self.file.close()

class Silent:
    def log(self, step, figures): ...

def function(): ...
"""


def test_loggers_of_another_package_get_config_and_figures_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_loggers.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    settings = {**TINY, "run.directory": "run", "run.loggers": ["my_loggers.Csv"]}
    train("quickstart", settings, quiet=True)
    lines = (tmp_path / "run/own.csv").read_text().splitlines()
    assert lines[0] == "resnet9 0"
    assert any("train/loss" in line for line in lines)
    assert any("eval/top1" in line for line in lines)
    assert main(["train", "--config", "run", "--dry-run"]) == 1, "a run folder may come from others"
    assert naming_all(capsys.readouterr().err, "run.loggers: my_loggers.Csv", "--trust-code")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("my_loggers.Csw", "has no Csw; the nearest is Csv"),
        ("my_loggers.function", "must be a class with the methods log, finish"),
        ("my_loggers.Silent", "has no finish"),
        ("other_loggers.Csv", "No module named 'other_loggers'"),
        ("logging.StreamHandler", "has no log"),
        ("torch.utils.tensorboard.SummaryWriter", "has no log"),
    ],
)
def test_loggers_that_are_none_are_refused_at_the_start(
    name: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_loggers.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    config = load_config(["--config", "quickstart", f"--run.loggers=[{name}]"])
    with pytest.raises(ConfigError) as refused:
        find_loggers(config)
    assert naming_all(str(refused.value), "run.loggers", named)


def point_of_sweep(tmp_path: Path) -> RunDir:
    """A point's run folder, as a sweep names it."""
    rundir = RunDir(tmp_path / "paper/points/3/run")
    rundir.path.mkdir(parents=True)
    labels = {"sweep": "paper", "run": "Muon/../x, batch=128, seed=1", "keys": ["optimizer.momentum"]}
    (rundir.path.parent / "point.json").write_text(json.dumps({"labels": labels}))
    return rundir


def test_loggers_name_a_point_by_sweep_case_batch_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir = point_of_sweep(tmp_path)
    played, mlflow = play(monkeypatch, PlayedWandb()), play_mlflow(monkeypatch, PlayedMlflow())
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    send(rundir)
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    send(rundir)
    assert [(call["name"], call["group"]) for call in played.inits] == [
        ("Muon/../x, batch=128, seed=1", group) for group in ("paper", "mine")
    ]
    send_to_mlflow(rundir)
    assert mlflow.calls[:2] == [
        (tmp_path / "paper/mlflow").resolve().as_uri(),
        ("of paper", "Muon/../x, batch=128, seed=1"),
    ]
    assert (tmp_path / "paper/mlflow").is_dir(), "one store for all points"


def test_loggers_tensorboard_names_the_folder_of_a_point_and_has_its_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    rundir = point_of_sweep(tmp_path)
    stated = {"optimizer": {"name": "muon", "momentum": 0.9, "ema_decay": None}, "run": {"seed": 1, "epochs": 2}}
    send(rundir, name="tensorboard", **stated)
    (folder,) = rundir.tensorboard.iterdir()
    assert folder.name == "paper_Muon_.._x_batch=128_seed=1"
    events = EventAccumulator(str(folder)).Reload()
    assert [event.value for event in events.Scalars("eval/top1")] == [0.5]
    found = HParamsPluginData.FromString(events.PluginTagToContent("hparams")["_hparams_/session_start_info"])
    values = {key: getattr(each, each.WhichOneof("kind")) for key, each in found.session_start_info.hparams.items()}
    assert values == {"optimizer.name": "muon", "optimizer.momentum": 0.9, "run.seed": 1, "run.epochs": 2}
