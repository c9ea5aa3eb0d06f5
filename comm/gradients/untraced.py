"""Keep torch.compile from tracing sums over ranks: it would compile in the version counters of the first step."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Decorate a function that runs outside of torch.compile. Without the compiler, a slow import, nothing traces."""
    known: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not known and "torch._dynamo" in sys.modules:
            known.append(torch.compiler.disable(function, reason="it sums over ranks: compile the model alone"))
        return (known[0] if known else function)(*args, **options)

    return call  # type: ignore[return-value]
