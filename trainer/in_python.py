"""Training from a script or a notebook: `bigbatch.train`."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from bigbatch.comm.backends.base import require_type
from bigbatch.comm.connect import find_process_env
from bigbatch.comm.connection import open_connections
from bigbatch.errors import ConfigError, exit_code_of
from bigbatch.trainer.config.dotted import CLASS, import_path_of
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.trainer.config.trust import TRUST
from bigbatch.trainer.machine.host import free_memory, set_deterministic, set_tf32
from bigbatch.trainer.observe.hooks import HooksObserver, TrainingHooks
from bigbatch.trainer.step.signals import STOP_SIGNALS
from bigbatch.trainer.step.stop_request import leave_stopped
from bigbatch.trainer.train import join, run_training


def train(
    config: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    hooks: TrainingHooks | None = None,
    quiet: bool = False,
    trust_code: bool = False,
) -> dict[str, Any]:
    """Train, as `bigbatch train` does; return the content of summary.json. Collective.

    config: a YAML file, a packaged experiment such as quickstart, or a run folder. overrides: values by dotted key,
    such as {"run.epochs": 2}; classes and functions stand for their import paths. hooks are called on every rank;
    quiet prints nothing; trust_code is --trust-code.
    A job of one process may call it repeatedly. A stop signal, such as Ctrl-C, saves a checkpoint and then raises
    SystemExit with the command's exit code 130; the same call continues from there. A second Ctrl-C interrupts.
    Raises: bigbatch.errors.UserError with a message that says what to do; its subclass ConfigError outside of the main
    thread. TypeError for hooks or overrides of another type.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("bigbatch.train handles signals, which only the main thread can do: call it there")
    hooks, overrides = TrainingHooks() if hooks is None else hooks, {} if overrides is None else overrides
    require_type(hooks, TrainingHooks, what="hooks", legal="bigbatch.TrainingHooks(...)")
    require_type(overrides, Mapping, what="overrides", legal='a dict, such as {"run.epochs": 2}')
    words = [f"--{key}={_word(key, value)}" for key, value in overrides.items()]
    trust = [TRUST] if trust_code else []
    experiment = load_config(["--config", str(config), *words, *trust])
    env = find_process_env(timeout_seconds=experiment.comm.meeting_seconds)
    others = set(open_connections)
    with _process_as_before():
        job = join(experiment, env)
        try:
            summary = run_training(experiment, job, observers=[HooksObserver(hooks)], is_quiet=quiet)
            device = job.communicator.device
        except BaseException as error:
            # the other ranks must not wait for this process, which may live on; healing may have replaced a connection
            for control in open_connections.keys() - others:
                open_connections[control].abort(exit_code_of(error))
            raise
    del job
    # metrics and readers are in reference cycles, which Python may keep alive for many runs
    free_memory(device)
    if summary is None:
        raise SystemExit(leave_stopped(env))
    hooks.on_end(summary)
    return summary


def _word(key: str, value: Any) -> str:
    """Return a value as a command-line argument. Raises: ConfigError for a value that no config can hold."""
    if isinstance(value, str | Path):
        return str(value)
    try:
        plain = _with_import_paths(value)
        if key == "data.root" and isinstance(value, type):
            plain = f"{CLASS}{plain}"
        return plain if isinstance(plain, str) else as_yaml(plain)
    except ValueError as error:
        raise ConfigError(f"{key}={value!r}: {error}") from error
    except TypeError as error:
        raise ConfigError(
            f"{key}={value!r} is of type {type(value).__name__}: give text, a number, None, or lists and dicts of these"
        ) from error


def _with_import_paths(value: Any) -> Any:
    """Return value with the import paths of classes and functions in their places. Raises: ValueError."""
    if isinstance(value, Mapping):
        return {key: _with_import_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_import_paths(each) for each in value]
    return import_path_of(value) if isinstance(value, type | FunctionType) else value


@contextmanager
def _process_as_before() -> Iterator[None]:
    """Restore the handlers of stop signals and torch's modes and number of threads after a run.

    Within the block, gradients are on and autocast is off, whatever modes of torch the caller is in.
    """
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    mode, num_threads = torch.get_deterministic_debug_mode(), torch.get_num_threads()
    cudnn, precision, is_tf32 = torch.backends.cudnn, "", False
    is_benchmark = cudnn.benchmark
    with suppress(RuntimeError):  # the process sets TF32 by torch's other way, whose mode torch does not tell here
        is_tf32, precision = cudnn.allow_tf32, torch.get_float32_matmul_precision()
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            # without a cache: casts that a nested autocast caches would live until these blocks end, as weights change
            torch.autocast("cpu", enabled=False, cache_enabled=False),
            torch.autocast("cuda", enabled=False, cache_enabled=False),
        ):
            yield
    finally:
        set_deterministic(mode)
        torch.set_num_threads(num_threads)
        cudnn.benchmark = is_benchmark
        if precision:
            set_tf32(is_tf32, precision=precision)
        for number, handler in before.items():
            signal.signal(number, handler)
