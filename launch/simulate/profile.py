"""Read the doctor's measurement of a model on one machine, as a rate of one device."""

from pathlib import Path
from typing import Any

from bigbatch.errors import SimulationError, first_line
from bigbatch.files import parse_json
from bigbatch.launch.simulate.cluster import Rate
from bigbatch.trainer.config.schema import Config

KEYS = ("model", "image_size", "microbatch_size", "precision")


def read_profile(path: Path, config: Config) -> Rate:
    """Read `bigbatch doctor --json FILE` as a rate of the config's model.

    Raises: SimulationError for another file, or one of another model, precision or microbatch.
    """
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        experiment = {key: record["experiment"][key] for key in KEYS}
        rate = float(record["rates"]["model_alone"]) / int(record["machine"]["world_size"])
    except (OSError, ValueError, OverflowError) as error:
        raise SimulationError(f"cannot read {path}: {first_line(error)}") from error
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise SimulationError(
            f"{path} holds no examination: make one by bigbatch doctor --config ... --json FILE"
        ) from error
    wanted: dict[str, Any] = {
        "model": config.model.name,
        "image_size": config.data.image_size,
        "microbatch_size": config.batch.microbatch_size,
        "precision": config.optimizer.precision,
    }
    for key, value in wanted.items():
        if experiment[key] != value:
            raise SimulationError(f"{path} was measured with {key} {experiment[key]}, and the recipe has {value}")
    if not 0 < rate < float("inf"):
        raise SimulationError(f"{path} states {rate} images/s of a device")
    return Rate(config.model.name, config.batch.microbatch_size, rate, f"measured: {path}")
