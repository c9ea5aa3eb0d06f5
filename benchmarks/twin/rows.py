"""Published measurements as rows of a table, and the facts of their systems. Pure except for reading the file."""

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from benchmarks.twin.fusion import CycledJob, InGroups
from benchmarks.twin.hardware import (
    DEFAULTS,
    RowConstants,
    across_bytes_per_second,
    across_latency_seconds,
    inside_bytes_per_second,
    resnet50_rate,
    stated_gbit_per_s,
)
from bigbatch.comm.gradients.fusion import PlanSizes
from bigbatch.errors import SimulationError, first_line
from bigbatch.files import RECORD_BYTES, open_plain
from bigbatch.tools.simulate.constants import GIGABIT
from bigbatch.tools.simulate.network import Carrier, Network
from bigbatch.tools.simulate.shapes import ModelShape, load_shape, shape_names
from bigbatch.tools.simulate.step import Fusion, SimulatedJob
from bigbatch.words import decimal

NEEDED = ("id", "accelerator", "num_accelerators", "batch_per_accelerator", "model")
"""Columns that a row must state to be used; a global batch replaces a local one."""
MAX_STATED = 1e9
"""Largest number that a row may state: accelerators, images, Gbit/s, milliseconds."""

UNIT_ERROR = 0.05
"""Least logarithm of the ratio at which a row's step and rate disagree: mixed units, or different runs."""

BROKEN = "exclude"
"""The role of a row that its table excludes from comparisons."""
MAX_PLAIN_GBIT = 25
"""Highest rate of a node's Ethernet that is assumed to have no RDMA, unless its name says so."""
MEBIBYTE = 2**20
DDP_FIRST_BYTES = MEBIBYTE
"""Bytes of PyTorch's first bucket."""
DEVICES_OF_UNSTATED_NODES = 8
FIRST_YEAR_OF_GRAPHS, FIRST_NCCL_OF_GRAPHS = 2021, (2, 9)
"""First year and first NCCL version of software that launches a step's kernels together, by graphs: MLPerf v1.0."""
MLPERF_YEARS = {"0.5": 2018, "0.6": 2019, "0.7": 2020}
"""Years of the first rounds; v1 was in 2021, and later rounds in the years after."""
EC2_CONNECTIONS, FIRST_YEAR_OF_CONNECTIONS, FIRST_VERSION_OF_CONNECTIONS = 16, 2020, (2, 5)
"""TCP connections that NCCL opens to a peer with EC2's network cards: 2 threads with 8 each, since 2.4.8 of 2019.
Rows state two numbers of a version, and some a year only. PUBLISHED: NVIDIA/nccl, src/transport/net_socket.cc."""
CHECKED_FRAMEWORKS = ("mxnet", "paddlepaddle", "pytorch", "tensorflow")
"""Frameworks whose sums published rows across nodes have checked."""
UNKNOWN_SHAPE = "resnet50"
"""Replaces a model with an unknown shape; such a row is marked as extrapolated."""


@dataclass(frozen=True)
class Row:
    """A line of the table; empty text for a value that is not stated."""

    stated: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.stated.get(column, "").strip()

    @property
    def id(self) -> str:
        return self["id"]

    @property
    def missing(self) -> list[str]:
        has_batch = bool(self["global_batch_size"])
        return [name for name in NEEDED if not self[name] and not (name == "batch_per_accelerator" and has_batch)]

    def check(self) -> None:
        if self.missing:
            raise SimulationError(f"row {self.id or 'without id'} states no {self.missing[0]}")
        self.job()
        self._number("batch_per_accelerator")
        self._number("global_batch_size")

    @cached_property
    def num_devices(self) -> int:
        return self._count("num_accelerators") or 0

    @cached_property
    def num_nodes(self) -> int:
        """Return the number of nodes; of eight accelerators each if it is not stated."""
        each = self._count("accelerators_per_node") or DEVICES_OF_UNSTATED_NODES
        nodes = self._count("num_nodes") or max(1, self.num_devices // each)
        if nodes > self.num_devices:
            raise SimulationError(f"row {self.id}: num_nodes={nodes} is more than num_accelerators={self.num_devices}")
        return nodes

    @cached_property
    def local_batch(self) -> float:
        return self._number("batch_per_accelerator") or (self._number("global_batch_size") or 0.0) / self.num_devices

    @cached_property
    def seconds(self) -> float | None:
        """Return the measured step; None for a question. Raises: SimulationError if step and rate disagree."""
        stated, rate = self._number("ms_per_step"), self._number("images_per_second")
        by_rate = self.local_batch * self.num_devices / rate if rate else None
        if stated and by_rate and abs(math.log(1e3 * by_rate / stated)) > UNIT_ERROR:
            raise SimulationError(
                f"row {self.id}: ms_per_step={stated:g} and images_per_second={rate:g} contradict each other: so many "
                f"images/s mean {1e3 * by_rate:.4g} ms"
            )
        return stated / 1e3 if stated else by_rate

    @cached_property
    def shape_name(self) -> str | None:
        """Return the model's shape name: ResNet-50 v1.5 -> resnet50; None if it is not known."""
        words = re.sub(r"[^a-z0-9]+", "", self["model"].lower())
        fitting = [name for name in shape_names() if words.startswith(name.replace("_", ""))]
        return max(fitting, key=len, default=None)

    @cached_property
    def shape(self) -> ModelShape:
        return load_shape(self.shape_name or UNKNOWN_SHAPE)

    @cached_property
    def alike(self) -> tuple[str, ...]:
        framework = self["framework"].split(",")[0]
        architecture = self.shape.name.rstrip("0123456789")  # models of one take similarly long per operation
        return self["accelerator"], self["precision"], framework, self["input_data"], self["system"], architecture

    @cached_property
    def carrier(self) -> Carrier:
        """Return the carrier of the sums, by the names of framework, library and link."""
        framework, library = self["framework"].lower(), self["collective_library_version"].lower()
        if "parameter server" in framework or "distributed_replicated" in framework:
            return "servers"
        if re.search("socket|gloo", library) or "tcp" in self["inter_node_link"].lower():
            return "sockets"
        if "mpi" in library and "nccl" not in library:
            return "host"
        return "sockets" if self._is_plain_ethernet else "nccl"

    @property
    def _is_plain_ethernet(self) -> bool:
        """Return whether NCCL finds no RDMA on the link: slow Ethernet, as in clouds' machines."""
        is_ethernet = re.search(r"ethernet|gbe", self["inter_node_link"], re.IGNORECASE)
        has_rdma = re.search(r"roce|rdma|efa", self["inter_node_link"], re.IGNORECASE)
        return bool(is_ethernet and not has_rdma) and (self.link_gbit_per_s or math.inf) <= MAX_PLAIN_GBIT

    @property
    def _has_ec2_connections(self) -> bool:
        names = f"{self['system']} {self['vendor']} {self['ladder']}"
        is_ec2 = re.search(r"(?<![a-z0-9])(ec2|aws|amazon)(?![a-z0-9])", names, re.IGNORECASE)
        if not is_ec2 or "gloo" in self["collective_library_version"].lower():
            return False
        if self.library_version:
            return self.library_version >= FIRST_VERSION_OF_CONNECTIONS
        return (self.year or FIRST_YEAR_OF_CONNECTIONS) >= FIRST_YEAR_OF_CONNECTIONS

    @property
    def software(self) -> tuple[str, str]:
        return self["framework"], self["collective_library_version"]

    @cached_property
    def link_gbit_per_s(self) -> float | None:
        """Return the stated rate of a node's links; None if there is none."""
        return self._number("inter_node_gbit_per_s") or stated_gbit_per_s(self["inter_node_link"])

    @property
    def has_unknown_link(self) -> bool:
        """Return whether the row crosses nodes, and no rate is stated for their links."""
        return self.num_nodes > 1 and not self.is_compiled and self.link_gbit_per_s is None

    @cached_property
    def unchecked(self) -> tuple[str, ...]:
        """Return the carrier and the framework for which few rows across nodes are published."""
        framework = self["framework"].split(",")[0]
        is_odd = self.num_nodes > 1 and not self.is_compiled and not framework.lower().startswith(CHECKED_FRAMEWORKS)
        few = "few published measurements"
        carriers = (f"carrier {self.carrier}: {few}",) if self._network(DEFAULTS).has_few_measurements else ()
        return (*carriers, *((f"framework {framework or 'not stated'}: {few}",) if is_odd else ()))

    @cached_property
    def library_version(self) -> tuple[int, int] | None:
        """Return NCCL's version; None if it is not stated."""
        found = re.match(r"NCCL (\d{1,4})\.(\d{1,4})", self["collective_library_version"])
        return (int(found[1]), int(found[2])) if found else None

    @cached_property
    def year(self) -> int | None:
        """Return the year of the figure, or of its round of MLPerf."""
        if found := re.search(r"\b(20\d\d)\b", self["round_or_year"]):
            return int(found[1])
        mlperf = re.search(r"MLPerf.* v(\d)(?:\.(\d))?", self["round_or_year"])
        return (MLPERF_YEARS.get(f"0.{mlperf[2]}") if mlperf[1] == "0" else 2020 + int(mlperf[1])) if mlperf else None

    @property
    def has_trees(self) -> bool:
        """Return whether NCCL has trees, besides rings: since version 2.4, of 2019."""
        if self.library_version:
            return self.library_version >= (2, 4)
        return not (self["collective_library_version"] == "NCCL" and self.year is not None and self.year < 2019)

    @property
    def device_rate(self) -> float | None:
        return resnet50_rate(self["accelerator"], is_fp32=self["precision"] == "fp32")

    @property
    def fusion(self) -> Fusion | None:
        """Read how gradients are grouped: `threshold / groups`, `25 MiB buckets`; else by the framework's default.

        None for Horovod's cycles.
        """
        stated = self["fusion"]
        if self.is_compiled:
            return InGroups(1)
        if groups := re.fullmatch(r"\d+ */ *(\d{1,6})", stated):
            return InGroups(max(1, int(groups[1])))
        if (buckets := re.match(r"(\d{1,6}(?:\.\d+)?) *MiB", stated)) and float(buckets[1]) > 0:
            return _ddp_sizes(float(buckets[1]))
        return _ddp_sizes(25) if "pytorch" in self["framework"].lower() else None

    def fixed_seconds(self, constants: RowConstants) -> float:
        is_old = self.year is not None and self.year < FIRST_YEAR_OF_GRAPHS
        if self.library_version is not None:
            is_old = self.library_version < FIRST_NCCL_OF_GRAPHS
        is_eager = is_old and not self.is_compiled
        each = constants.eager_seconds_per_tensor if is_eager else constants.seconds_per_tensor
        return each * len(self.shape.num_elements)

    @property
    def is_compiled(self) -> bool:
        """Return whether a step is one compiled program, with its sums: on TPUs."""
        return self["accelerator"].startswith("TPU")

    def job(self, constants: RowConstants = DEFAULTS) -> SimulatedJob:
        element_bytes = 2 if self["precision"] == "fp16" else 4  # mixed precision sends fp32
        network = self._network(constants)
        if self.fusion is None:
            return CycledJob(self.shape, network, element_bytes=element_bytes)
        return SimulatedJob(self.shape, network, self.fusion, element_bytes=element_bytes)

    def _network(self, constants: RowConstants) -> Network:
        per_node = max(1, self.num_devices // self.num_nodes)
        rate = self.link_gbit_per_s
        across = across_bytes_per_second(rate, devices_per_node=per_node, constants=constants)
        inside = inside_bytes_per_second(self["intra_node_link"])
        if self.is_compiled:
            inside = inside_bytes_per_second("torus")
            across = inside * per_node
        if self.carrier == "servers" and rate:
            across = rate * GIGABIT
        servers = re.search(rf"\b{self.num_devices} GPUs use (\d+) parameter servers", self["note"])
        latency = across_latency_seconds(self["inter_node_link"], constants)
        constants = replace(constants, across_latency_seconds=latency)
        if self._has_ec2_connections:
            connections = EC2_CONNECTIONS * constants.connections_gbit_per_s
            constants = replace(constants, connections_gbit_per_s=connections)
        if "real" not in self["input_data"].lower():
            constants = replace(constants, input_share=0.0)
        return Network(
            self.num_nodes,
            per_node,
            inside,
            across,
            carrier=self.carrier,
            has_trees=self.has_trees,
            num_servers=int(servers[1]) if servers else None,
            constants=constants,
        )

    def _number(self, column: str) -> float | None:
        text = self[column]
        if not text:
            return None
        try:
            value = decimal(text)
        except ValueError:
            raise SimulationError(f"row {self.id}: {column}={text} is not a number") from None
        if not 0 < value <= MAX_STATED:
            raise SimulationError(f"row {self.id}: {column}={text} must be above 0, and {MAX_STATED:.0e} at most")
        return value

    def _count(self, column: str) -> int | None:
        value = self._number(column)
        if value is not None and value != int(value):
            raise SimulationError(f"row {self.id}: {column}={self[column]} must be a whole number")
        return None if value is None else int(value)


def _ddp_sizes(mebibytes: float) -> PlanSizes:
    size = max(1, round(mebibytes * MEBIBYTE))
    return PlanSizes(threshold_bytes=size, buffer_bytes=size, first_buffer_bytes=min(DDP_FIRST_BYTES, size))


@dataclass(frozen=True)
class Table:
    """The valid rows of a file, and a line for each of the others."""

    rows: list[Row]
    unusable: list[str]


def read_given(path: Path) -> Table:
    """Read measured rows; skip those that state no step, or that the table excludes.

    Raises: SimulationError for a file that is no such table, or without any measured row.
    """
    measured = [each for each in _read(path) if each[1]["ms_per_step"] or each[1]["images_per_second"]]
    lines = [each for each in measured if each[1]["role"] != BROKEN]
    table = _usable(path, lines, lambda row: row.seconds)
    if not table.rows:
        odd = f": {table.unusable[0]}" if table.unusable else ""
        raise SimulationError(
            f"{path} has no row with a measured ms_per_step, or images_per_second: nothing can be scaled from it{odd}"
        )
    return table


def read_questions(path: Path) -> Table:
    """Read rows to predict. Raises: SimulationError for a file that is no such table, or without a usable row."""
    table = _usable(path, _read(path), lambda row: row.local_batch)
    if not table.rows:
        raise SimulationError(table.unusable[0] if table.unusable else f"{path} has no row below its first line")
    return table


def _usable(path: Path, lines: Sequence[tuple[int, Row]], needed: Callable[[Row], object]) -> Table:
    table = Table([], [])
    for number, row in lines:
        try:
            row.check()
            needed(row)
            table.rows.append(row)
        except SimulationError as error:
            table.unusable.append(f"{path}, line {number}: {error}")
    return table


def _read(path: Path) -> list[tuple[int, Row]]:
    try:
        # spreadsheets write a byte order mark before the first column
        with io.TextIOWrapper(open_plain(path, most=RECORD_BYTES), encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            found = [
                (reader.line_num, Row({k: v for k, v in line.items() if k and isinstance(v, str)})) for line in reader
            ]
            columns = reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SimulationError(f"cannot read {path} as a table: {first_line(error)}") from error
    if missing := Row(dict.fromkeys(columns, "stated")).missing:
        raise SimulationError(f"{path} has no column {missing[0]}: its first line must name those of a table of rows")
    return found
