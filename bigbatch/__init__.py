"""Train ImageNet with very large batches on clusters of GPUs; the public names load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LAMB": "bigbatch.trainer.optim.lamb",
    "LARS": "bigbatch.trainer.optim.lars",
    "Lion": "bigbatch.trainer.optim.lion",
    "Muon": "bigbatch.trainer.optim.muon",
    "Shampoo": "bigbatch.trainer.optim.shampoo",
    "param_groups": "bigbatch.trainer.optim.param_groups",
    "Precision": "bigbatch.trainer.step.precision",
    "Scaling": "bigbatch.trainer.step.loss_scale",
    "GradientReducer": "bigbatch.comm.gradients.reducer",
    "DistributedOptimizer": "bigbatch.comm.gradients.distributed_optimizer",
    "ddp_comm_hook": "bigbatch.comm.gradients.ddp_hook",
    "all_reduce": "bigbatch.comm.gradients.broadcast",
    "broadcast_object": "bigbatch.comm.gradients.broadcast",
    "broadcast_optimizer_state": "bigbatch.comm.gradients.broadcast",
    "broadcast_parameters": "bigbatch.comm.gradients.broadcast",
    "connect": "bigbatch.comm.connect",
    "load_model": "bigbatch.trainer.inference.plain_model",
    "train": "bigbatch.trainer.in_python",
    "TrainingHooks": "bigbatch.trainer.observe.hooks",
}

__all__ = [
    "LAMB",
    "LARS",
    "DistributedOptimizer",
    "GradientReducer",
    "Lion",
    "Muon",
    "Precision",
    "Scaling",
    "Shampoo",
    "TrainingHooks",
    "all_reduce",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "connect",
    "ddp_comm_hook",
    "load_model",
    "param_groups",
    "train",
]

if TYPE_CHECKING:
    from bigbatch.comm.connect import connect
    from bigbatch.comm.gradients.broadcast import (
        all_reduce,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from bigbatch.comm.gradients.ddp_hook import ddp_comm_hook
    from bigbatch.comm.gradients.distributed_optimizer import DistributedOptimizer
    from bigbatch.comm.gradients.reducer import GradientReducer
    from bigbatch.trainer.in_python import train
    from bigbatch.trainer.inference.plain_model import load_model
    from bigbatch.trainer.observe.hooks import TrainingHooks
    from bigbatch.trainer.optim.lamb import LAMB
    from bigbatch.trainer.optim.lars import LARS
    from bigbatch.trainer.optim.lion import Lion
    from bigbatch.trainer.optim.muon import Muon
    from bigbatch.trainer.optim.param_groups import param_groups
    from bigbatch.trainer.optim.shampoo import Shampoo
    from bigbatch.trainer.step.loss_scale import Scaling
    from bigbatch.trainer.step.precision import Precision


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'bigbatch' has no attribute {name!r}")
