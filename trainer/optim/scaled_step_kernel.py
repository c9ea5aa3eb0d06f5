"""Triton's kernel of ScaledStep."""

# Triton reads the arguments' types at each call; annotations are for constants alone
# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def update_kernel(
    addresses,
    sizes,
    programs,
    scales,
    divisor,
    lr,
    overflow,
    momentum,
    weight_decay,
    num_tensors,
    num_programs,
    HAS_DIVISOR: tl.constexpr,
    HAS_OVERFLOW: tl.constexpr,
    IS_LR_ON_DEVICE: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update BLOCK elements of one tensor; all are fp32."""
    program = tl.program_id(0)
    tensor = tl.load(programs + program)
    index = tl.load(programs + num_programs + program) + tl.arange(0, BLOCK)
    size = tl.load(sizes + tensor)
    if HAS_OVERFLOW:
        size = tl.where(tl.load(overflow) == 1.0, 0, size)
    is_there = index < size
    weights = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32)) + index
    grads = tl.load(addresses + num_tensors + tensor).to(tl.pointer_type(tl.float32)) + index
    weight, grad = tl.load(weights, is_there), tl.load(grads, is_there)
    if HAS_DIVISOR:
        grad = tl.div_rn(grad, tl.load(divisor))
    update = tl.load(scales + tensor) * (grad + weight_decay * weight)
    if HAS_MOMENTUM:
        momenta = tl.load(addresses + 2 * num_tensors + tensor).to(tl.pointer_type(tl.float32)) + index
        kept = momentum * tl.load(momenta, is_there) + update
        tl.store(momenta, kept, is_there)
        update = update + momentum * kept if NESTEROV else kept
    rate = tl.load(lr) if IS_LR_ON_DEVICE else lr
    tl.store(weights, weight - rate * update, is_there)
