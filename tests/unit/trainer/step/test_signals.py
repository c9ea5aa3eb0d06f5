"""A run that is asked to stop."""

import os
import signal

import pytest

from bigbatch.trainer.step.signals import StopRequest


def test_signals_let_a_second_ctrl_c_interrupt_at_once() -> None:
    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        stop = StopRequest()
        assert not stop.is_set
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set
        assert stop.signal_name == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
