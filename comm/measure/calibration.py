"""The table that a job measures at its first start on a cluster, and reads at later ones."""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from bigbatch import __version__
from bigbatch.comm.algorithms.hybrid import HybridTable, Times
from bigbatch.comm.backends.mpi import mpi_library
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.fusion import DEFAULT_SIZES
from bigbatch.comm.measure.sizes import measure_sums, sizes_up_to
from bigbatch.comm.tuning.conditions import cpu_name, device_name, gather_cluster, link_rates, nccl_version, num_cores
from bigbatch.comm.tuning.own_record import as_text, difference_of, find_record, from_first, store_record
from bigbatch.comm.tuning.tuned import CHANGES
from bigbatch.user_settings import nccl_settings

FORMAT = "bigbatch calibration 1"
SECONDS = 10.0
"""Time limit of the measurement, by which the first start on a cluster takes longer."""


@dataclass(frozen=True)
class Calibration:
    """A table that was measured on this cluster."""

    table: HybridTable
    source: str
    """Origin of the table, and errors of files that were not used, for the user."""
    text: str
    """Text of the table's file, for a run to keep."""


def calibrate(
    communicator: Communicator,
    *,
    is_fresh: bool = False,
    interface: str | None = None,
    kept: Path | None = None,
    folder: Path | None,
    buffer_bytes: int = DEFAULT_SIZES.buffer_bytes,
    seconds: float = SECONDS,
) -> Calibration:
    """Return the table that was measured on this cluster, or measure it and store it in folder. Collective.

    Rank 0 reads the files and sends its choice to the other ranks: first kept, the file of a run to resume, then the
    one in folder (None: there is no folder to write to). is_fresh: read neither. interface: as for connect().
    buffer_bytes: size of the largest fusion buffer, with which measuring begins before shorter sums; later jobs use the
    table with any buffers. Ends within seconds, unless the first short sums, which open connections, or about five
    exchanges between the ranks take longer.
    Raises: CommError if a sum was wrong; PeerLostError.
    """
    start = time.perf_counter()
    is_first = communicator.rank == 0
    facts = _collect_facts(communicator, interface=interface)
    digest = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    size = f"{communicator.topology.num_nodes}nodes-{communicator.world_size}ranks"
    path = folder / f"{communicator.backend.name}-{size}-{digest}.json" if folder else None
    record, note = None, ""
    if is_first and not is_fresh:
        check = partial(_require_valid, facts=facts, algorithms=communicator.algorithms)
        record, note = find_record([each for each in (kept, path) if each], form=FORMAT, check=check)
    record, note = from_first(communicator, [record, note])
    if record is None:
        sizes = sizes_up_to(buffer_bytes)
        sums = measure_sums(communicator, sizes, dtype=torch.float32, start=start, seconds=seconds)
        if is_first:
            took = time.perf_counter() - start
            record = {
                "format": FORMAT,
                "changes": CHANGES,
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "seconds": round(took, 3),
                "table": sums.table.as_rows(),
                **facts,
                "all_reduce_seconds": {
                    str(size): {name: measured.median for name, measured in at_size.items()}
                    for size, at_size in sorted(sums.times.items())
                },
            }
            note += "".join(f"{each}; " for each in sums.hung.values())
            left_out = _left_out(sums.times, sizes)
            left_out += sums.disturbance and f", without a choice, as other work disturbed it ({sums.disturbance}),"
            note += f"measured in {took:.1f} s{left_out} and {store_record(path, record)}"
        record, note = from_first(communicator, [record, note])
    return Calibration(HybridTable.from_rows(record["table"]), note, as_text(record))


def _left_out(times: Times, sizes: Sequence[int]) -> str:
    """Return which sizes were not measured for lack of time; "" if all were."""
    if not times:
        return ", without any sum, for lack of time,"
    above = [f"above {max(times):,}"] if max(times) < sizes[-1] else []
    below = [f"below {min(times):,}"] if min(times) > sizes[0] else []
    return f", without sums {' and '.join((*above, *below))} bytes, for lack of time," if above or below else ""


def _collect_facts(communicator: Communicator, *, interface: str | None) -> dict[str, Any]:
    """Return, on rank 0, all facts on which a table depends, as JSON values. Collective."""
    is_nccl, is_mpi = (communicator.backend.name == name for name in ("nccl", "mpi"))
    mine = {
        "cpu": f"{cpu_name()}, {num_cores()} cores",
        "device": device_name(communicator.device),
        "links": link_rates(),
        "interface": communicator.env.interface or interface,
        "libraries": {
            "bigbatch": __version__,
            "torch": torch.__version__,
            **({"NCCL": nccl_version()} if is_nccl else {}),
            **({"MPI": mpi_library()} if is_mpi else {}),
        },
        "environment": nccl_settings() if is_nccl else {},
    }
    texts = communicator.control.collect_text(json.dumps(mine), what="description of the cluster")
    alike = [[len(list(same)), json.loads(text)] for text, same in groupby(texts)]
    facts = {"cluster": asdict(gather_cluster(communicator)), "ranks": alike}
    return dict(json.loads(json.dumps(facts)))  # tuples become lists, as in the file


def _require_valid(record: dict[str, Any], *, facts: dict[str, Any], algorithms: Collection[str]) -> None:
    """Raise ValueError, KeyError or TypeError if a record is not valid for this cluster."""
    if difference := difference_of(record, facts):
        raise ValueError(f"it is of another cluster, or of other settings: {difference}")
    if not set(HybridTable.from_rows(record["table"]).algorithms) <= set(algorithms):
        raise ValueError("it is damaged")
