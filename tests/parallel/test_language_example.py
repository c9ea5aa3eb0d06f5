"""examples/language_model.py on the first pages of its novel: alone, on two ranks, and in each precision."""

import re
import shutil
from pathlib import Path
from runpy import run_path

import pytest
from forked_ranks import places
from test_parallel import fork_job, run_forked

pytestmark = pytest.mark.long


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = ["--epochs", "2", "--batch-size", "4"]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example beside 12,000 letters of its novel."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "text").mkdir()
    novel = (EXAMPLES / "text/frankenstein.txt").read_text(encoding="ascii")
    (folder / "text/frankenstein.txt").write_text(novel[:12_000])
    return Path(shutil.copy(EXAMPLES / "language_model.py", folder))


def run_copy(script: str, *words: str) -> int:
    """What a forked rank runs."""
    return int(run_path(script)["main"](words))


def alone(script: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of one process without a launcher."""
    return fork_job("test_language_example:run_copy", [str(script), *words], [{}], timeout_seconds=250)


def perplexities(output: str) -> list[tuple[float, float]]:
    """(in training, held out), by epoch; rank 0 alone reports them."""
    found = re.findall(r"^epoch \d of 2: perplexity (\d+\.\d\d) in training, (\d+\.\d\d) held out; ", output, re.M)
    assert len(found) == 2, output
    return [(float(seen), float(unseen)) for seen, unseen in found]


@pytest.fixture(scope="module")
def in_fp32(script: Path) -> list[tuple[float, float]]:
    """Alone."""
    code, output = alone(script, *SHORT, "--generate", "5")
    assert code == 0, output
    drawn = output.partition("epoch 2 of 2: ")[2].splitlines()[1]
    assert len(re.findall(r"\w+(?:'\w+)*|--|[^\w\s]", drawn)) >= 5, drawn
    return perplexities(output)


def test_example_learns(in_fp32: list[tuple[float, float]]) -> None:
    assert in_fp32[1][0] < 0.7 * in_fp32[0][0]
    assert in_fp32[1][1] < in_fp32[0][1]


def test_example_learns_with_other_cells(script: Path) -> None:
    code, output = alone(script, *SHORT, "--cell", "gru")
    assert code == 0, output
    first, second = perplexities(output)
    assert second[0] < 0.8 * first[0]
    assert second[1] < first[1]


def test_example_on_two_ranks_is_the_same(script: Path, in_fp32: list[tuple[float, float]]) -> None:
    together = perplexities(run_forked(2, [str(script), *SHORT], target="test_language_example:run_copy"))
    for ours, theirs in zip(together, in_fp32, strict=True):
        assert ours == pytest.approx(theirs, rel=3e-4)


def test_example_in_half_precision_learns(script: Path, in_fp32: list[tuple[float, float]]) -> None:
    code, output = alone(script, *SHORT, "--precision", "fp16")
    assert code == 0, output
    found = perplexities(output)
    assert found != in_fp32
    for ours, theirs in zip(found, in_fp32, strict=True):
        assert ours == pytest.approx(theirs, rel=0.05)


def test_example_refuses_a_batch_that_ranks_cannot_share(script: Path) -> None:
    words = [str(script), "--batch-size", "5"]
    code, output = fork_job("test_language_example:run_copy", words, places(2), timeout_seconds=250)
    assert code == 1
    assert re.search("^language_model.py: --batch-size 5 .*2 ranks", output, re.M), output


def test_example_names_a_learning_rate_out_of_reach(script: Path) -> None:
    code, output = alone(script, *SHORT, "--learning-rate", "1e30")
    assert code == 1
    assert re.search("^language_model.py: .*epoch 1 .*--learning-rate$", output, re.M), output
