"""Digests of a step's images, activations, gradients and weights, with which `bigbatch diff` compares runs."""

import difflib
import fnmatch
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import ConfigError
from bigbatch.trainer.checkpoint.checkpoint import save_checkpoint
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.observe.observer import Observed, Observer
from bigbatch.trainer.observe.replicas import digest, replicas
from bigbatch.trainer.step.plan import Parts
from bigbatch.words import listed

MODULUS = 1 << 64
MIX = 0x9E3779B97F4A7C15 - MODULUS
"""Odd constant for mixing, so that two changes do not cancel."""
IMAGES, ACTIVATIONS, BEFORE_SUM = "images", "activations", "gradients before the sum"
MAX_NAMES = 12
"""Limit of layer names listed in an error."""
Row = tuple[str, str, int, str]
"""(phase, name of the layer or parameter, microbatch's number in the step, digest)."""
SUMMED, STATE = "gradients", "weights and state"
PHASES = (IMAGES, ACTIVATIONS, BEFORE_SUM, SUMMED, STATE)
"""Phases of a step, in order."""
BY_MICROBATCH = (ACTIVATIONS, BEFORE_SUM)
"""Phases with a digest per microbatch of the global batch, in its order, independent of the rank."""

PLACE_LETTERS = 8
"""Letters of one image's digest. Two images collide once in 4e9; the digest of all images differs even then."""


def values_folder(values: Path, *, rank: int) -> Path:
    """Return the folder of a rank's kept values, with a folder per step."""
    return values / f"rank-{rank}"


class DigestRecorder(Observer):
    """Records digests of a step every so many steps, for the first rank's log.

    Images and labels: one digest of the global batch as the loader yields it, in one order for any number of ranks, and
    one of each image, with its position in the split. Activations (of run.digest_layers) and gradients before the sum:
    per microbatch; none in a captured step, which Python does not see. Summed gradients: per parameter; none with a
    sharded update, in which no rank has all. Values that run.digest_values names are kept whole, in a folder per rank.
    Raises: ConfigError for a pattern that matches nothing.
    """

    def __init__(self, observed: Observed) -> None:
        config, parts, communicator = observed.config, observed.parts, observed.communicator
        self._plan, self._parts, self._communicator, self._log = observed.plan, parts, communicator, observed.log
        self._every_steps = config.run.digest_every_steps
        self._is_sharded, self._is_captured = config.optimizer.sharded, config.compute.cuda_graph
        self._images: list[Tensor] = []
        """Digests of the images (B) of each microbatch of this step."""
        self._positions: list[int] = []
        chosen = chosen_layers(parts.model, config.run.digest_layers or ())
        self._kept = chosen_values(parts.model, chosen, config.run.digest_values or ())
        rundir = RunDir(Path(config.run.directory))
        self._run, self._folder = rundir.path, values_folder(rundir.values, rank=communicator.rank)
        self.single = MicrobatchDigests(parts.model, layers=chosen, kept=self._kept)

    def start(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches unchanged, and digest those of recorded steps."""
        plan = self._plan
        for number, batch in enumerate(batches):
            step, index = divmod(number, len(plan.microbatches))
            # the step takes them one at a time, each before its forward
            self.single.microbatch = plan.microbatches[index]
            if self._is_due(plan.first_step + step + 1):
                if index == 0:
                    self._images, self._positions = [], []
                self._images.append(digests_of_images(batch))
                self._positions += positions_of(batch)
            yield batch

    def _is_due(self, done: int) -> bool:
        return done % self._every_steps == 0

    def before_step(self, step: int) -> None:
        """Start to record if this step is recorded; after_step() ends it."""
        if self._is_due(step + 1) and not self._is_captured:
            self.single.start()

    def before_update(self) -> None:
        self.single.stop()  # a microbatch that an audit recomputes belongs to no record

    def close(self) -> None:
        self.single.stop()

    def after_step(self, done: int) -> None:
        """Log the record of the step that has just ended, if it is recorded.

        Raises: CheckpointError if kept values cannot be written, for example on a full disk.
        """
        if self._is_due(done) and (record := self._record(done)):
            self._log("digests", record)

    def _record(self, done: int) -> dict[str, Any]:
        """Return the record on rank 0; empty on other ranks. Collective."""
        parts, communicator = self._parts, self._communicator
        parts.precision.wait_for_weights()
        rows, images = self.single.take(), torch.cat(self._images).tolist()
        if self._kept:
            values: dict[str, Any] = dict(self.single.values)
            if communicator.rank == 0:  # equal on all ranks
                gradients = summed_gradients(parts, is_sharded=self._is_sharded)
                values[SUMMED] = {name: {0: [on_host(g)]} for name, g in gradients.items() if name in self._kept}
            save_checkpoint(self._folder, values, step=done, top1=None, keep=sys.maxsize, within=self._run)
        texts = communicator.connection.control.collect_text(
            json.dumps([images, self._positions, rows]), what=f"collection of the digests of step {done}"
        )
        if communicator.rank != 0:
            return {}
        gathered = [json.loads(text) for text in texts]
        return {
            "step": done,
            **self._by_place([each[:2] for each in gathered]),
            **self._by_microbatch([rows for _, _, rows in gathered]),
            **digests_of_update(parts, done=done, is_sharded=self._is_sharded),
        }

    def _by_place(self, gathered_P: Sequence[Any]) -> dict[str, Any]:
        """Merge the ranks' digests of single images, in the order of the global batch."""
        ordered: list[tuple[int, int]] = [(0, 0)] * sum(len(images) for images, _ in gathered_P)
        for rank, (images, positions) in enumerate(gathered_P):
            numbers = self._plan.division.of(rank)
            size = len(images) // len(numbers)
            for index, pair in enumerate(zip(images, positions, strict=True)):
                ordered[numbers[index // size] * size + index % size] = pair
        return by_place(ordered)

    def _by_microbatch(self, rows_P: Sequence[Any]) -> dict[str, Any]:
        """Merge the ranks' digests, with the rank of each microbatch."""
        ranks = [0] * self._plan.division.num_microbatches
        for rank in range(len(rows_P)):
            for number in self._plan.division.of(rank):
                ranks[number] = rank
        return {"ranks": ranks, **by_microbatch(chain(*rows_P), num_microbatches=len(ranks))}


def digest_in_order(digests: Sequence[int]) -> str:
    """Return one digest of the images' digests, which depends on their order."""
    return hex_digest(sum(digest * (2 * place + 1) for place, digest in enumerate(digests)))


def by_place(ordered: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return a record's entries on images. ordered: digest and position of each, in the order of the global batch."""
    digests = [digest for digest, _ in ordered]
    return {
        IMAGES: digest_in_order(digests),
        # the upper half: all bits influence it through the product with MIX
        "places": "".join(hex_digest(digest)[:PLACE_LETTERS] for digest in digests),
        "positions": [position for _, position in ordered],
    }


def by_microbatch(rows: Iterable[Row], *, num_microbatches: int) -> dict[str, Any]:
    """Return a record's digests by phase and name: a list over the microbatches of the global batch."""
    together: dict[str, dict[str, list[str]]] = {phase: {} for phase in BY_MICROBATCH}
    for phase, name, number, found in rows:
        together[phase].setdefault(name, [""] * num_microbatches)[number] = found
    return together


def positions_of(batch: Batch) -> Sequence[int]:
    """Return the positions in the split of a microbatch's images: one twice if drawn twice, those of replacements."""
    return batch.request.indices_B.tolist() if batch.positions is None else batch.positions


def digests_of_images(batch: Batch) -> Tensor:
    """Return a digest (int64) of each image of a microbatch with its label, of shape B.

    Digests the loader's uint8 images; independent of their memory format.
    """
    images_B = digest(image_CHW.contiguous() for image_CHW in batch.images_BCHW)
    return images_B * MIX + batch.labels_B.to(images_B.device)


def digests_of_update(parts: Parts, *, done: int, is_sharded: bool) -> dict[str, dict[str, str]]:
    """Return a record's digests of the summed gradients and of the updated state. Waits for the device."""
    return {
        SUMMED: _hex_digests(summed_gradients(parts, is_sharded=is_sharded)),
        STATE: _hex_digests(replicas(parts, done=done)),
    }


def summed_gradients(parts: Parts, *, is_sharded: bool) -> dict[str, Tensor]:
    """Return the last step's gradient sums over ranks, by parameter; none with a sharded update."""
    named = () if is_sharded else parts.model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


def _hex_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    if not tensors:
        return {}
    # in logical order: compute.channels_last changes no value
    found = digest(tensor.contiguous() for tensor in tensors.values())
    return {name: hex_digest(value) for name, value in zip(tensors, found.tolist(), strict=True)}


class MicrobatchDigests:
    """Digests gradients and layers' outputs of single microbatches, by hooks from start() to take().

    Hooks get a gradient before it is added to those of other microbatches, and before any sum over ranks. A layer that
    is called several times in a forward has one digest of all its outputs; recomputation in backward does not count.
    kept: layers and parameters whose values are kept whole.
    """

    def __init__(self, model: nn.Module, *, layers: Sequence[str], kept: Sequence[str] = ()) -> None:
        self._model, self._layers, self._kept = model, layers, kept
        self._hooks: list[RemovableHandle] = []
        self._found: dict[tuple[str, str, int], Tensor] = {}
        self._is_forward = False
        self.microbatch = 0
        """Number of the current or next microbatch."""
        self.values: dict[str, dict[str, dict[int, list[Tensor]]]] = {}
        """Values kept since start(), by phase, name and microbatch, in the order of a layer's outputs."""

    def start(self) -> None:
        model = self._model
        self.values = {}
        named = dict(model.named_modules())
        self._hooks = [
            p.register_hook(partial(self._take, BEFORE_SUM, name))
            for name, p in model.named_parameters()
            if p.requires_grad
        ]
        if self._layers:
            self._hooks += [
                named[name].register_forward_hook(partial(self._take_outputs, name)) for name in self._layers
            ]
            # tells the forward from backward, which calls layers too when it recomputes activations
            self._hooks += [model.register_forward_pre_hook(partial(self._enter, True))]
            self._hooks += [model.register_forward_hook(partial(self._enter, False))]

    def stop(self) -> None:
        """Remove the hooks; take() still returns the digests."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def take(self) -> list[Row]:
        """Remove the hooks; return the digests in the order of computation. Synchronizes with the device."""
        self.stop()
        found, self._found = self._found, {}
        values = torch.stack(list(found.values())).tolist() if found else []
        return [(*place, hex_digest(value)) for place, value in zip(found, values, strict=True)]

    def _enter(self, is_forward: bool, *_: object) -> None:
        self._is_forward = is_forward

    def _take_outputs(self, name: str, module: nn.Module, inputs: object, outputs: object) -> None:
        if self._is_forward:
            for tensor in _tensors(outputs):
                self._take(ACTIVATIONS, name, tensor)

    def _take(self, phase: str, name: str, tensor: Tensor) -> None:
        place = (phase, name, self.microbatch)
        # in logical order, independent of the memory format
        found = digest([tensor.contiguous()])[0]
        former = self._found.get(place)
        self._found[place] = found if former is None else former * MIX + found
        if name in self._kept:
            of_name = self.values.setdefault(phase, {}).setdefault(name, {})
            of_name.setdefault(self.microbatch, []).append(on_host(tensor))


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory. Synchronizes with the device."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        yield from _tensors(list(outputs.values()))
    elif isinstance(outputs, list | tuple):
        for each in outputs:
            yield from _tensors(each)


def hex_digest(value: int) -> str:
    """Return a digest as 16 hexadecimal digits."""
    return f"{value % MODULUS:016x}"


def chosen_layers(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the layers that match a pattern, in the model's order. Raises: ConfigError for a pattern without match."""
    names = [name for name, _ in model.named_modules() if name]
    return _chosen(names, patterns, key="run.digest_layers", what="layer of the model")


def chosen_values(model: nn.Module, layers: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the given layers, and the parameters, that match a pattern. Raises: ConfigError as chosen_layers."""
    names = [*layers, *(name for name, p in model.named_parameters() if p.requires_grad)]
    return _chosen(names, patterns, key="run.digest_values", what="parameter, or layer of run.digest_layers,")


def _chosen(names: Sequence[str], patterns: Sequence[str], *, key: str, what: str) -> list[str]:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3)
            others = [*near, *(name for name in names if name not in near)]
            raise ConfigError(f"{key}: no {what} is named {pattern}: there are {listed(others, most=MAX_NAMES)}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
