"""The results of `bigbatch comm tune` for one cluster and one model, and their file. Imports no torch."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.comm.algorithms.hybrid import HybridTable
from bigbatch.comm.gradients.fusion import PlanSizes, TensorSpec
from bigbatch.errors import TunedError
from bigbatch.files import parse_json, read_plain, require_nameable, write_whole

FORMAT = "bigbatch comm tune 1"

CHANGES = (
    "the order in which gradients are added, and so their rounding: runs with another table, or none, end with other "
    "bits, within rounding, but for run.reproducible"
)
"""Effect of a table on a run's bits, stated in every file."""
DEFAULT_FOLDER = Path("tuned")


@dataclass(frozen=True)
class ClusterFacts:
    """Facts that must be the same for measured times to hold. The network itself has no name to compare."""

    backend: str
    world_size: int
    group_sizes: tuple[int, ...]
    placement: str
    """block: the ranks of each node are consecutive; scattered: they are not."""
    wire_dtype: str | None
    device: str
    reduce_dtype: str
    buffers: str


SETTINGS = ("wire_dtype", "reduce_dtype", "buffers")
"""Facts that are configuration keys of comm, not properties of the machines."""


def make_cluster(groups: Sequence[Sequence[int]], **facts: Any) -> ClusterFacts:
    """Return the facts of a cluster. groups: the ranks of each node. facts: those that do not follow from groups."""
    is_block = all(list(group) == list(range(group[0], group[0] + len(group))) for group in groups)
    return ClusterFacts(
        world_size=sum(len(group) for group in groups),
        group_sizes=tuple(len(group) for group in groups),
        placement="block" if is_block else "scattered",
        **facts,
    )


def fingerprint(tensors: Sequence[TensorSpec]) -> str:
    """Return 16 hexadecimal digits that identify a model's gradients by name, size and dtype, in any order."""
    lines = sorted(f"{tensor.name} {tensor.num_elements} {tensor.dtype}" for tensor in tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Tuned:
    """The choices for one cluster and model, and their evidence."""

    cluster: ClusterFacts
    model: str
    """Name of the model, for the user; tensors distinguish models."""
    tensors: tuple[TensorSpec, ...]
    """The gradients, in the order in which they become ready."""
    table: HybridTable
    sizes: PlanSizes
    command: str
    """The command that made the file, and makes it again."""
    evidence: Mapping[str, Any]
    """Measured times, simulated exposed times, conditions: for the user and for the simulator."""

    def require_model(self, tensors: Sequence[TensorSpec], *, path: Path) -> None:
        """Raise TunedError if the file was made for another model."""
        theirs, ours = ({t.name: (t.num_elements, t.dtype) for t in each} for each in (self.tensors, tensors))
        name = next((name for name in (*theirs, *ours) if theirs.get(name) != ours.get(name)), None)
        if name is None:
            return
        if name in theirs and name in ours:
            (there, its_dtype), (here, own_dtype) = theirs[name], ours[name]
            difference = f"{name} is {there} {its_dtype} there, {here} {own_dtype} here"
        else:
            difference = f"{name} is not among {'this' if name in theirs else 'that'} model's gradients"
        raise TunedError(
            f"{path} was tuned for another model: {difference}; tune for this one: {self.command}, with its own "
            "--config"
        )

    def require_cluster(self, cluster: ClusterFacts, *, path: Path) -> None:
        """Raise TunedError if the file was made on another cluster, or with other settings of comm.

        comm.reduce_dtype makes no difference if nothing travels in half precision.
        """
        wire = self.cluster.wire_dtype
        dtypes = {wire if wire and tensor.dtype == "float32" else tensor.dtype for tensor in self.tensors}
        travels_in_half = not dtypes.isdisjoint(("float16", "bfloat16"))
        for name, here in vars(cluster).items():
            there = getattr(self.cluster, name)
            if there == here or (name == "reduce_dtype" and not travels_in_half):
                continue
            if name in SETTINGS:
                raise TunedError(
                    f"{path} was tuned with another setting: comm.{name} {_show(there)} there, {_show(here)} here; set "
                    f"it to that, or measure with this one: {self.command}, with its own --comm.{name}"
                )
            raise TunedError(
                f"{path} was tuned on another cluster: {name} {_show(there)} there, {_show(here)} here; "
                f"measure this one, with the ranks that will train: {self.command}"
            )


def _show(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else "null" if value is None else str(value)


def default_path(cluster: ClusterFacts, model: str, tensors: Sequence[TensorSpec]) -> Path:
    """Return the path for a cluster and model: tuned/<model>-<backend>-<ranks per node>-<fingerprint>.json."""
    sizes = "+".join(map(str, cluster.group_sizes))
    if len(set(cluster.group_sizes)) == 1:
        sizes = f"{len(cluster.group_sizes)}x{cluster.group_sizes[0]}"
    text = json.dumps([dataclasses.asdict(cluster), fingerprint(tensors)])
    return DEFAULT_FOLDER / f"{model}-{cluster.backend}-{sizes}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def require_writable(path: Path) -> None:
    """Make the folder of a file that will be written. Raises: TunedError if the system refuses the file."""
    try:
        require_nameable(path)
    except OSError as error:
        raise TunedError(f"cannot write {path}: {error.strerror}; choose another --output") from error


def write_tuned(tuned: Tuned, path: Path) -> None:
    """Replace the file in one step. Raises: TunedError if the system refuses."""
    record = {
        "format": FORMAT,
        "command": tuned.command,
        "changes": CHANGES,
        "cluster": dataclasses.asdict(tuned.cluster),
        "table": tuned.table.as_rows(),
        "fusion": dataclasses.asdict(tuned.sizes),
        "model": tuned.model,
        "fingerprint": fingerprint(tuned.tensors),
        "tensors": [dataclasses.astuple(tensor) for tensor in tuned.tensors],
        "evidence": tuned.evidence,
    }
    require_writable(path)
    try:
        write_whole(path, (json.dumps(record, indent=1) + "\n").encode())
    except OSError as error:
        raise TunedError(f"cannot write {path}: {error.strerror}; choose another --output") from error


def read_tuned(path: Path) -> Tuned:
    """Read a file of write_tuned. Raises: TunedError for a missing, foreign or damaged file."""
    return parse_tuned(read_text(path), path=path)


def read_text(path: Path) -> str:
    """Read a file's text. Raises: TunedError for a file that cannot be read."""
    try:
        return read_plain(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TunedError(f"cannot read {path}: {reason}; bigbatch comm tune makes such a file") from error


def parse_tuned(text: str, *, path: Path) -> Tuned:
    """Parse the text of a tuned file; path is for messages. Raises: TunedError for a foreign or damaged one."""
    try:
        record = parse_json(text)
    except ValueError as error:
        raise TunedError(f"{path} is not JSON ({error}); make it again with bigbatch comm tune") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise TunedError(f"{path} is not in the format {FORMAT!r}; make it again with bigbatch comm tune")
    try:
        return _parse(record)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise TunedError(f"{path} is damaged ({what}); make it again with bigbatch comm tune") from error


def _parse(record: Mapping[str, Any]) -> Tuned:
    cluster = record["cluster"]
    tensors = tuple(TensorSpec(*fields) for fields in record["tensors"])
    if fingerprint(tensors) != record["fingerprint"]:
        raise ValueError("its tensors do not match its fingerprint")
    return Tuned(
        cluster=ClusterFacts(**{**cluster, "group_sizes": tuple(cluster["group_sizes"])}),
        model=record["model"],
        tensors=tensors,
        table=HybridTable.from_rows(record["table"]),
        sizes=PlanSizes(**record["fusion"]),
        command=record["command"],
        evidence=record["evidence"],
    )
