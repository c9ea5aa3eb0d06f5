"""Law 4: all ranks hold identical bits, and take the same decisions. Run on 3 ranks by ranks_agree.py."""

from tests.laws.jobs import Forked, run

PRECISIONS = ("fp32", "bf16", "fp16", "fp16_autocast")
MODELS = ("WithBatchNorm", "WithAttention")


def test_weights_are_identical_after_each_step() -> None:
    """Different data on each rank, an overflow on one rank only: the same bits everywhere after every step."""
    cases = (*PRECISIONS, *(f"fp32:tests.laws.foreign_models.{name}" for name in MODELS))
    done = run(Forked(cases, ranks=3, target="tests.laws.ranks_agree:main"))
    for case in cases:
        assert len([line for line in done.stdout.splitlines() if line.endswith(f"6 steps of {case}")]) == 3, done.stdout
