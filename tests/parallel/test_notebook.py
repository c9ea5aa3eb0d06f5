"""examples/first_run.ipynb in a Jupyter kernel: what its cells promise."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints
from bigbatch.trainer.datasets.generated import CLASSES, write_dataset

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

SMALLER = {
    "bigbatch data generate data/shapes": "true",  # the test has written fewer images
    "--run.epochs 3 --schedule.warmup_epochs 1 --batch.global_batch_size 256": "--run.epochs 1 "
    "--schedule.warmup_epochs 0 --batch.global_batch_size 40 --batch.microbatch_size 20 --batch.bn_span 20",
    '"batch.global_batch_size": 256': '"batch.global_batch_size": 40, "batch.microbatch_size": 20, "batch.bn_span": 20',
}
"""What is run instead of words of its cells: the same 19 steps, of fewer images."""
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/first_run.ipynb"


@pytest.mark.long
def test_notebook_of_a_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    write_dataset(tmp_path / "data/shapes", train_per_class=76, val_per_class=5, side_pixels=(36, 48))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "commit it without outputs"
    for words, smaller in SMALLER.items():
        (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
        cell.source = cell.source.replace(words, smaller)
    nbclient.NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()

    def shown(word: str) -> list[Any]:
        (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and word in cell.source]
        return cell.outputs

    def printed(word: str) -> str:
        return "".join(output.get("text", "") for output in shown(word))

    assert "2 ranks" in printed("bigbatch launch")
    assert len(list_checkpoints(tmp_path / "runs/first/checkpoints")) > 0
    for word in ("imshow", "left.plot"):  # a kernel may add a line on standard error
        assert any("image/png" in output.get("data", {}) for output in shown(word)), shown(word)
    stopped = shown("press_stop)")
    assert [output["ename"] for output in stopped if output["output_type"] == "error"] == ["SystemExit"]
    assert "saved runs/second/checkpoints/step-" in printed("press_stop)")
    bars = [output["data"]["text/html"] for output in stopped if output["output_type"] == "display_data"]
    assert len(bars) == 1, "each report replaces the bar"
    assert re.search(r'<progress value="1\d" max="19">', bars[0])
    assert re.search(r"^resumed after step 1\d of 19$", printed("resumed_after_step"), re.M)
    assert all(f"{name}_00000.JPEG" in printed("bigbatch predict") for name in CLASSES)
