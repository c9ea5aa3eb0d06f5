"""Our own files, as others may have changed them: JSON that no reader can follow gets one clear line, or none."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from faults.table import read_records

from bigbatch.errors import UserError
from bigbatch.experiments.engine.folder import SweepFolder, require_same_experiment
from bigbatch.experiments.engine.plan import read_plan
from bigbatch.files import parse_json
from bigbatch.launch.launchers.slurm_queue import RUN_FOLDER_MARK, QueuedJob
from bigbatch.tools.emulate import state as emulated
from bigbatch.trainer.config.file import PACKAGED, load_config
from bigbatch.trainer.datasets.generated import MANIFEST, write_dataset
from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.datasets.prepare import IMAGENETTE, SOURCES, missing_splits
from bigbatch.trainer.folder import owner
from bigbatch.trainer.input.shards import read_packed
from bigbatch.user_settings import SITE_VARIABLE, site_settings

DEEP = "[" * 30_000
TEXTS = {
    "deep": DEEP,
    "deep inside": '{"version": ' + DEEP,
    "digits": "9" * 5000,
    "infinite": "1e400",
    "list": "[]",
    "surrogate": '"\\ud800"',
}


def test_parse_json_refuses_deep_nests_as_any_other_damage() -> None:
    for text in (DEEP, DEEP.encode(), "{", "9" * 5000):
        with pytest.raises(ValueError, match=r"deep|line 1|digits"):
            parse_json(text)
    assert parse_json(b'{"a": [1, null]}') == {"a": [1, None]}


QUICK = load_config(["--config", "quickstart"])
SCALING = read_plan(PACKAGED / "sweeps/scaling.yaml")
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "prepared": (SOURCES, lambda root: missing_splits(root, IMAGENETTE["160px"])),
    "generated": (MANIFEST, write_dataset),
    "search": ("base.yaml", lambda root: require_same_experiment(root / "base.yaml", QUICK, config="quickstart")),
    "point": ("points/0/point.json", lambda root: SweepFolder(root).read_state(0)),
    "summary": ("points/0/run/summary.json", lambda root: SweepFolder(root).read_summary(0)),
    "sweep": ("sweep.yaml", lambda root: SweepFolder(root).require_same(SCALING)),
    "emulated": ("cluster.json", emulated.load),
    "campaign": ("faults.jsonl", lambda root: read_records(root / "faults.jsonl")),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", READERS)
def test_damaged_file_gives_one_line(name: str, text: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    (tmp_path / "val" / "n01440764").mkdir(parents=True)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(TEXTS[text])
    with suppress(UserError):
        assert not read(tmp_path)
    assert (tmp_path / file).read_text() == TEXTS[text]


@pytest.mark.parametrize("text", TEXTS)
def test_odd_words_of_the_environment_and_of_a_job_do_not_match(text: str) -> None:
    site_settings({SITE_VARIABLE: TEXTS[text]})
    job = QueuedJob({"WorkDir": "/"}, script=f"#!/bin/sh\n{RUN_FOLDER_MARK}{TEXTS[text]}\n")
    assert job.run_folder in (None, Path("/", "\ud800"))


def test_keeper_with_an_infinite_number_is_not_read(tmp_path: Path) -> None:
    facts = {"keeper": 1e400, "start_ticks": 1, "boot_id": "", "plan": {"ranks_per_node": [1], "num_nodes": 1}}
    (tmp_path / "cluster.json").write_text(json.dumps(facts).replace("Infinity", "1e400"))
    assert emulated.load(tmp_path) is None


@pytest.mark.parametrize("change", [{"job": 7}, {"pid": "1"}, {"host": ["x"]}, {"restart": 1e400}])
def test_claim_of_other_types_tells_nothing(change: dict[str, object], tmp_path: Path) -> None:
    claim = dataclasses.asdict(owner.own_claim()) | {"has_ended": True}
    path = tmp_path / f"{owner.PREFIX}1"
    path.write_text(json.dumps(claim))
    assert owner._read(path) is not None
    path.write_text(json.dumps(claim | change))
    assert owner._read(path) is None


@pytest.mark.parametrize("text", TEXTS)
def test_shard_with_an_unreadable_record_is_packed_again(text: str, tmp_path: Path) -> None:
    source, target = tmp_path / "images", tmp_path / "packed"
    write_dataset(source, train_per_class=1, val_per_class=1, side_pixels=(32, 32))
    pack(source, target, recipe=PackRecipe(), splits=("val",))
    index = (target / "val" / "index.json").read_bytes()
    facts = json.loads(index)
    record = {"shard": facts["shards"][0], "rows": [[0, 1, 2, 3]]}
    planted = json.dumps(record).replace("[[0", f"[[{TEXTS[text]}") if text != "deep inside" else TEXTS[text]
    (target / "val" / "index.json").unlink()
    (target / "val" / ".shard-000000.json").write_text(planted)
    pack(source, target, recipe=PackRecipe(), splits=("val",))
    assert (target / "val" / "index.json").read_bytes() == index
    assert len(read_packed(target / "val")) == facts["num_pictures"]
    (target / "val" / "pack.json").write_text(TEXTS[text])
    with pytest.raises(UserError):
        pack(source, target, recipe=PackRecipe(), splits=("val",))
