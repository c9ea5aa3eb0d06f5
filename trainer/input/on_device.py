"""From host memory to the model's device without waiting for it."""

import numpy as np
import torch
from torch import Tensor


def on_device(table: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return a host table as a tensor on device; from pageable memory the copy would wait for a GPU."""
    tensor = torch.as_tensor(table)
    must_pin = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if must_pin else tensor).to(device, non_blocking=True)
