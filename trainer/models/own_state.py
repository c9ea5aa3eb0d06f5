"""State that a model changes in forward, besides batch norm's running statistics, which the step handles."""

from torch import Tensor, nn

from bigbatch.errors import ConfigError


def refuse_own_state(model: nn.Module) -> None:
    """Make the first training forward of model raise ConfigError, with the name, if it changes a buffer.

    Each rank's forwards would move it by their own microbatches: spectral norm's vectors, centers, counters.
    """
    before: dict[str, Tensor] = {}

    def remember(model: nn.Module, _inputs: object) -> None:
        if model.training:
            before.update({name: buffer.clone() for name, buffer in model.named_buffers()})

    def compare(model: nn.Module, _inputs: object, _logits: object) -> None:
        if not model.training:
            return
        for handle in handles:
            handle.remove()
        changed = [name for name, buffer in model.named_buffers() if not buffer.equal(before[name])]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ConfigError(
                f"run.reproducible=True cannot keep {changed[0]}{more}, which the model changes in its forward, on "
                "each rank by its own microbatches: set it to false, or take a model without"
            )

    # before the hooks that are there: a norm's statistics are folded by one of them
    handles = (model.register_forward_pre_hook(remember), model.register_forward_hook(compare, prepend=True))
