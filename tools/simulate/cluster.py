"""A cluster as data: the values of its file and their sources, or a rate that the doctor measured."""

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

from bigbatch import __version__
from bigbatch.errors import SimulationError, first_line, or_nearest
from bigbatch.files import TEXT_BYTES, parse_json, read_plain
from bigbatch.paths import PathError
from bigbatch.tools.simulate.constants import DEFAULTS, GIGABIT
from bigbatch.tools.simulate.network import Carrier, Network
from bigbatch.tools.simulate.published import plain_name
from bigbatch.tools.simulate.shapes import ModelShape, load_shape, shape_names
from bigbatch.tools.simulate.step import Compute
from bigbatch.trainer.config.file import PACKAGED
from bigbatch.trainer.config.schema import Config, lookup
from bigbatch.trainer.config.strict_yaml import parse_yaml
from bigbatch.user_settings import measured_folder

FOLDER = PACKAGED / "clusters"

LIMITS: Mapping[str, tuple[float, float]] = {
    # least and most of each value; a value beyond them is probably in another unit
    "devices_per_node": (1, 1024),
    "inside_gbyte_per_s": (0.01, 10_000),
    "across_gbit_per_s": (0.01, 100_000),
    "across_latency_us": (0.1, 100_000),
    "price_per_device_hour": (0, 10_000),
    "switch_nodes": (1, 1_000_000),
    "oversubscription": (1, 1000),
    "input_images_per_second": (0.1, 1e9),
    "cores_per_node": (1, 10_000),
    "input_images_per_second_per_core": (0.1, 1e6),
}
NEEDED = ("device", "devices_per_node", "inside_gbyte_per_s", "across_gbit_per_s")
KNOWN = (*dict.fromkeys((*NEEDED, *LIMITS)), "carrier", "has_trees", "rates")
WHOLE = ("devices_per_node", "switch_nodes", "cores_per_node")
INPUT, CORES, EACH_CORE = "input_images_per_second", "cores_per_node", "input_images_per_second_per_core"
FACTS = ("value", "source", "assumed")
RATE_FACTS = ("model", "local_batch", "images_per_second", "source", "assumed")


@dataclass(frozen=True)
class Rate:
    """Images per second of one device training a model, at a number of images per step."""

    model: str
    local_batch: float
    images_per_second: float
    source: str
    is_assumed: bool = False


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind. assumed: the keys with values that were not published."""

    name: str
    device: str
    network: Network
    """Network of one node; of_devices enlarges it."""
    rates: tuple[Rate, ...]
    price_per_device_hour: float | None
    switch_nodes: int | None
    """Nodes that one switch connects at full rate; None for any number."""
    oversubscription: float
    """Factor by which the rate drops with more nodes than one switch connects."""
    input_images_per_second: float | None
    """Rate of one node's loaders; None if unknown: then they are assumed to keep up."""
    assumed: tuple[str, ...]

    def of_devices(self, count: int) -> Network:
        """Return the network of that many devices on full nodes, or on a part of one.

        Raises: SimulationError for a count that fills no whole number of nodes.
        """
        per_node = self.network.devices_per_node
        if count > per_node and count % per_node:
            raise SimulationError(
                f"{count} devices do not fill nodes of {per_node}: take {count // per_node * per_node} or "
                f"{-(-count // per_node) * per_node}"
            )
        nodes = max(1, count // per_node)
        share = 1 / self.oversubscription if self.switch_nodes and nodes > self.switch_nodes else 1.0
        across = self.network.across_bytes_per_second * share
        return replace(self.network, num_nodes=nodes, devices_per_node=count // nodes, across_bytes_per_second=across)

    def compute(
        self, shape: ModelShape, *, rate: Rate | None = None, pixels: int | None = None
    ) -> tuple[Compute, Rate]:
        """Return a device's compute time for a model, and the rate that it is based on.

        rate: measured by the caller, at the same image size. Another model's rate is scaled by operations, another
        image size's by pixels. Raises: SimulationError if no rate is known.
        """
        found = rate or min(
            self.rates, key=lambda each: abs(load_shape(each.model).operations - shape.operations), default=None
        )
        if found is None:
            raise SimulationError(f"cluster {self.name} states no rate of a device: give --rate IMAGES_PER_SECOND")
        per_tensor = self.network.constants.seconds_per_tensor
        known = load_shape(found.model)
        fixed = per_tensor * len(known.num_elements)
        step = found.local_batch / found.images_per_second
        # a rate of small batches is nearly all fixed time: then an image costs at least a tenth of its apparent time
        each_image = max(step - fixed, 0.1 * step) / found.local_batch
        scale = shape.operations / known.operations
        if rate is None and pixels is not None:
            scale *= (pixels / shape.pixels) ** 2
        return Compute(each_image * scale, per_tensor * len(shape.num_elements)), found


def cluster_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_cluster(name: str, *, devices_per_node: int | None = None) -> Cluster:
    """Read a packaged cluster, or a file; devices_per_node: replaces the file's value.

    Raises: SimulationError naming the key, its value and the legal ones.
    """
    names = cluster_names()
    path = FOLDER / f"{name}.yaml" if name in names else Path(name)
    if not path.is_file():
        raise SimulationError(
            f"cluster '{name}' is not a file{or_nearest(name, names)}; packaged are {', '.join(names)}"
        )
    try:
        stated = parse_yaml(read_plain(path, most=TEXT_BYTES))
    except (OSError, ValueError) as error:
        raise SimulationError(f"cannot read {path}: {first_line(error)}") from error
    try:
        cluster = _read_cluster(path.stem, stated)
    except SimulationError as error:
        raise SimulationError(f"{path}: {error}") from error
    if devices_per_node is None:
        return cluster
    return replace(cluster, network=replace(cluster.network, devices_per_node=devices_per_node))


def _read_cluster(name: str, stated: object) -> Cluster:
    """Read a file's content. Raises: SimulationError, which load_cluster completes by the file's name."""
    if not isinstance(stated, dict) or not all(isinstance(key, str) for key in stated):
        raise SimulationError(f"it is not a cluster: it must state {', '.join(NEEDED)}")
    for key in stated:
        if key not in KNOWN:
            raise SimulationError(f"{key} is not a key of a cluster{or_nearest(key, KNOWN)}")
    for key in NEEDED:
        if key not in stated:
            raise SimulationError(f"{key} is missing")
    rates = stated.get("rates") or []
    if not isinstance(rates, list):
        raise SimulationError("rates must be a list")
    facts = {key: fact for key, fact in stated.items() if key != "rates"}
    for key, fact in facts.items():
        if not isinstance(fact, dict) or "value" not in fact or not fact.get("source"):
            raise SimulationError(f"{key} must state a value and its source: {key}: {{value: ..., source: ...}}")
        if odd := [name for name in fact if name not in FACTS]:
            raise SimulationError(f"{key} states {odd[0]}, and may state {', '.join(FACTS)}")
    numbers = {key: _number(key, facts[key]["value"]) for key in LIMITS if key in facts}
    carrier = facts.get("carrier", {"value": "nccl"})["value"]
    if carrier not in get_args(Carrier):
        raise SimulationError(f"carrier={carrier} must be one of {', '.join(get_args(Carrier))}")
    has_trees = facts.get("has_trees", {"value": True})["value"]
    if not isinstance(has_trees, bool):
        raise SimulationError(f"has_trees={has_trees} must be true or false")
    if (CORES in numbers) != (EACH_CORE in numbers):
        raise SimulationError(f"{CORES} and {EACH_CORE} go together: state both, or {INPUT} alone")
    if INPUT in numbers and CORES in numbers:
        raise SimulationError(f"{INPUT} and {CORES} both state what a node's loaders bring: keep one")
    latency = numbers.get("across_latency_us")
    constants = replace(DEFAULTS, across_latency_seconds=latency * 1e-6) if latency else DEFAULTS
    return Cluster(
        name=name,
        device=str(facts["device"]["value"]),
        network=Network(
            1,
            int(numbers["devices_per_node"]),
            numbers["inside_gbyte_per_s"] * 1e9,
            numbers["across_gbit_per_s"] * GIGABIT * constants.link_share,
            carrier=carrier,
            has_trees=has_trees,
            constants=constants,
        ),
        rates=tuple(map(_rate, rates)),
        price_per_device_hour=numbers.get("price_per_device_hour"),
        switch_nodes=int(numbers["switch_nodes"]) if "switch_nodes" in numbers else None,
        oversubscription=numbers.get("oversubscription", 1.0),
        input_images_per_second=numbers[CORES] * numbers[EACH_CORE] if CORES in numbers else numbers.get(INPUT),
        assumed=tuple(key for key, fact in facts.items() if fact.get("assumed")),
    )


def _number(key: str, value: Any) -> float:
    least, most = LIMITS[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise SimulationError(f"{key}={value} must be a number from {least:g} to {most:g}")
    if key in WHOLE and value != int(value):
        raise SimulationError(f"{key}={value} must be a whole number")
    return float(value)


def _rate(stated: Any) -> Rate:
    if not isinstance(stated, dict) or any(key not in stated for key in RATE_FACTS[:4]):
        raise SimulationError(f"each rate must state {', '.join(RATE_FACTS[:4])}")
    if odd := [key for key in stated if key not in RATE_FACTS]:
        raise SimulationError(f"a rate states {odd[0]}, and may state {', '.join(RATE_FACTS)}")
    if stated["model"] not in shape_names():
        raise SimulationError(f"no shape of model={stated['model']} is known")
    for key in ("local_batch", "images_per_second"):
        value = stated[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e7:
            raise SimulationError(f"a rate's {key}={value} must be a number above 0")
    return Rate(
        stated["model"],
        float(stated["local_batch"]),
        float(stated["images_per_second"]),
        str(stated["source"]),
        bool(stated.get("assumed")),
    )


PROFILE_KEYS = {
    "model": "model.name",
    "image_size": "data.image_size",
    "microbatch_size": "batch.microbatch_size",
    "precision": "optimizer.precision",
}
"""Field of a doctor's record that must fit -> key of the recipe."""


def profile_path(config: Config, device: str) -> Path | None:
    """Return where `bigbatch doctor` keeps a config's rate on a device; None if the user has no home.

    The name has a digest of all that may change the rate. Raises: PathError.
    """
    data, batch = config.data, config.batch
    sizes = (data.image_size, data.train_sizes, data.num_classes, batch.microbatch_size, batch.bn_span)
    parts = (config.model, config.compute, config.optimizer, config.augment, config.run.reproducible, sizes)
    digest = hashlib.sha256(repr((*parts, __version__, version("torch").partition("+")[0])).encode()).hexdigest()[:16]
    folder = measured_folder("rates")
    return folder and folder / f"{re.sub(r'[^a-zA-Z0-9]+', '-', plain_name(device))}-{digest}.json"


def kept_rate(config: Config, device: str) -> Rate | None:
    """Return the rate that `bigbatch doctor` measured for this user; None if there is none for config and device."""
    # it is missing or damaged, the folder's name is odd, or torch is not installed
    with contextlib.suppress(SimulationError, PathError, PackageNotFoundError):
        return read_profile(path, config) if (path := profile_path(config, device)) else None
    return None


def read_profile(path: Path, config: Config) -> Rate:
    """Read `bigbatch doctor --json FILE` as a rate of the config's model.

    Raises: SimulationError for another file, or one of another model, precision or microbatch.
    """
    wanted = {name: lookup(config, key) for name, key in PROFILE_KEYS.items()}
    try:
        record = parse_json(read_plain(path))
        experiment = {key: record["experiment"][key] for key in wanted}
        rate = float(record["rates"]["model_alone"]) / int(record["machine"]["world_size"])
        date = record.get("conditions", {}).get("date")
        once = ", measured once" if record["rates"].get("turns") == 1 else ""
        noise = f", noisy: equal measurements differed by {record['spread']:.0%}" if record.get("is_noisy") else once
    except (OSError, ValueError, OverflowError) as error:
        raise SimulationError(f"cannot read {path}: {first_line(error)}") from error
    except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise SimulationError(
            f"{path} is not a record of bigbatch doctor: make one by bigbatch doctor --config ... --json FILE"
        ) from error
    for name, key in PROFILE_KEYS.items():
        found, value = experiment[name], wanted[name]
        if found != value:
            raise SimulationError(
                f"{path} was measured with {name} {found}, and the recipe has {value}: simulate that one by "
                f"--{key} {found}, or measure again by bigbatch doctor ... --{key} {value}"
            )
    if not 0 < rate < float("inf"):
        raise SimulationError(f"{path} states {rate} images/s of a device")
    source = f"measured by bigbatch doctor{f' on {str(date)[:10]}' if date else ''}: {path}{noise}"
    return Rate(config.model.name, config.batch.microbatch_size, rate, source)
