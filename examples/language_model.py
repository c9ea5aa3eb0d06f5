"""Train a word-level language model on a novel or another text, by bigbatch's parts, on any number of ranks.

    python examples/language_model.py
    mpirun -n 2 python examples/language_model.py --precision bf16
    python examples/language_model.py --cell gru --epochs 30 --learning-rate 0.005
    torchrun --nproc-per-node 2 examples/language_model.py --epochs 2
    python examples/language_model.py --text FILE --generate 100

The batch is global: however many ranks share it, they train the same model, up to rounding.
"""

import argparse
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad

import bigbatch
from bigbatch.comm.communicator import Communicator
from bigbatch.errors import ConfigError, TrainingDiverged, UserError, print_line
from bigbatch.trainer.optim.schedule import one_cycle

NOVEL = Path(__file__).with_name("text") / "frankenstein.txt"
UNKNOWN, IGNORED = 0, -100
WIDTH = 128
STEP_WORDS = 32
"""What a step reads of each row; gradients reach no further back."""
HELD_OUT_ROWS = 16

Block = tuple[Tensor, Tensor]
"""Words and the word after each, [rows, STEP_WORDS or fewer]; the latter IGNORED beyond the end."""
State = Tensor | tuple[Tensor, Tensor]
"""What a row of text has been so far: of an LSTM two tensors."""
CELLS = {"elman": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


def read_words(path: Path, *, min_words: int = 0) -> tuple[Tensor, Tensor, list[str]]:
    """Return training words (N), held-out words (the last tenth), and the vocabulary; words seen once are UNKNOWN.

    Raises: ConfigError for a file that cannot be read, is not UTF-8 or has fewer words than min_words.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--text {path}: {error}: name a text file in UTF-8") from error
    words = re.findall(r"\w+(?:'\w+)*|--|[^\w\s]", text.lower())
    if len(words) < min_words:
        few = f"--text {path} has {len(words)} words, but {min_words} are needed"
        raise ConfigError(f"{few}: name a longer one, or lower --batch-size")
    split = len(words) * 9 // 10
    counts = Counter(words[:split]).most_common()
    known = ["<unknown>", *(word for word, count in counts if count > 1)]
    numbers = {word: number for number, word in enumerate(known)}
    words_N = torch.tensor([numbers.get(word, UNKNOWN) for word in words])
    return words_N[:split], words_N[split - 1 :], known  # what precedes the first held-out word is known


def make_blocks(words_N: Tensor, *, num_rows: int) -> list[Block]:
    """Cut words_N into num_rows rows and these into steps: every word but the first is a target, once."""
    length = math.ceil((len(words_N) - 1) / num_rows)
    missing = (0, num_rows * length - (len(words_N) - 1))
    inputs_RL = pad(words_N[:-1], missing, value=UNKNOWN).view(num_rows, length)
    targets_RL = pad(words_N[1:], missing, value=IGNORED).view(num_rows, length)
    return list(zip(*(torch.split(rows_RL, STEP_WORDS, dim=1) for rows_RL in (inputs_RL, targets_RL)), strict=True))


def num_targets(block: Block) -> int:
    """Count the targets, without those beyond the end."""
    return int((block[1] != IGNORED).sum())


class WordModel(nn.Module):
    """Puts a recurrent layer between an embedding and the same embedding as output layer."""

    def __init__(self, num_words: int, *, cell: str = "lstm") -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, WIDTH)
        self.recurrent = CELLS[cell](WIDTH, WIDTH, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(num_words))
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, block: Block, state: State | None) -> tuple[Tensor, State]:
        """Return the sum of the losses of all targets, and the state to continue from, without its gradients."""
        words_RT, targets_RT = block
        logits_RTV, state = self.predict(words_RT, state)
        logits_NV, targets_N = logits_RTV.flatten(0, 1).float(), targets_RT.flatten()
        loss = cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")
        return loss, state.detach() if isinstance(state, Tensor) else (state[0].detach(), state[1].detach())

    def predict(self, words_RT: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the logits of the word after each (R, T, V), and the state to continue from."""
        hidden_RTC, state = self.recurrent(self.embedding(words_RT), state)
        return linear(hidden_RTC, self.embedding.weight, self.bias), state


def perplexity(total_1: Tensor, count: int) -> float:
    """Compute exp of the mean of losses: n where a model takes n words for equally likely. Waits for the device."""
    return (total_1 / count).exp().item()


@torch.no_grad()
def evaluate(model: WordModel, blocks: Sequence[Block]) -> float:
    """Compute the perplexity of all targets."""
    total_1, state = blocks[0][0].new_zeros(1, dtype=torch.float64), None
    for block in blocks:
        loss, state = model(block, state)
        total_1 += loss
    return perplexity(total_1, sum(map(num_targets, blocks)))


@torch.no_grad()
def generate(model: WordModel, vocabulary: Sequence[str], *, num_words: int, seed: int) -> str:
    """Draw words one after the other, each by the model's probabilities after those before it; never UNKNOWN."""
    generator = torch.Generator().manual_seed(seed)
    word = vocabulary.index(".") if "." in vocabulary else UNKNOWN
    words: list[str] = []
    state = None
    for _ in range(num_words):
        logits_RTV, state = model.predict(torch.tensor([[word]], device=model.bias.device), state)
        logits_V = logits_RTV.flatten().float().cpu()
        logits_V[UNKNOWN] = -math.inf
        word = int(torch.multinomial(logits_V.softmax(dim=0), 1, generator=generator))
        words.append(vocabulary[word])
    return re.sub(r" ([.,;:!?)])", r"\1", " ".join(words))


def unigram_perplexity(training_N: Tensor, held_out_N: Tensor, num_words: int) -> float:
    """Compute that of a model that has counted each word in training, plus one, and looks at no context."""
    counts = torch.bincount(training_N, minlength=num_words).double() + 1
    losses_N = -(counts / counts.sum()).log()[held_out_N[1:]]
    return perplexity(losses_N.sum(), len(losses_N))


def train(args: argparse.Namespace, communicator: Communicator) -> None:
    """Train and report on rank 0. Collective. Raises: UserError."""
    rank, num_ranks, device = communicator.rank, communicator.world_size, communicator.device
    if args.batch_size % num_ranks:
        raise ConfigError(f"--batch-size {args.batch_size} does not divide by {num_ranks} ranks: give a multiple")
    own = slice(rank * args.batch_size // num_ranks, (rank + 1) * args.batch_size // num_ranks)
    rows = max(args.batch_size, HELD_OUT_ROWS)
    training_N, held_out_N, vocabulary = read_words(args.text, min_words=20 * rows)  # two held-out words in each row
    num_words = len(vocabulary)
    blocks = make_blocks(training_N, num_rows=args.batch_size)
    held_out = [(x.to(device), y.to(device)) for x, y in make_blocks(held_out_N, num_rows=HELD_OUT_ROWS)]

    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = WordModel(num_words, cell=args.cell).to(device)
    scaling = bigbatch.Scaling(initial=2.0**16, growth_steps=200) if args.precision == "fp16" else None
    precision = bigbatch.Precision(model, name=args.precision, device=device, scaling=scaling, clip_norm=1.0)
    model.recurrent.flatten_parameters()  # the cast moved them, and cuDNN wants them in one piece
    groups = bigbatch.param_groups(model, weight_decay=0.01, substitute=precision.masters)
    optimizer = bigbatch.LAMB(groups, lr=args.learning_rate)
    reducer = bigbatch.GradientReducer(model.named_parameters(), communicator)
    num_steps = args.epochs * len(blocks)
    schedule = one_cycle(base_lr=args.learning_rate, warmup_steps=num_steps // 10, total_steps=num_steps)
    if rank == 0:
        frequencies = unigram_perplexity(training_N, held_out_N, num_words)
        print(communicator)
        print(f"{len(training_N):,} words to train on, {len(held_out_N) - 1:,} held out, {num_words:,} different")
        print(f"held-out perplexity by word frequencies alone: {frequencies:.2f}", flush=True)

    for epoch in range(args.epochs):
        start, total_1, state = time.monotonic(), torch.zeros(1, dtype=torch.float64, device=device), None
        for step, (words_RT, targets_RT) in enumerate(blocks, start=epoch * len(blocks)):
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
            loss, state = model((words_RT[own].to(device), targets_RT[own].to(device)), state)
            precision.backward(loss / num_targets((words_RT, targets_RT)))  # of all ranks: gradients are summed
            reducer.wait()
            precision.update_(optimizer)
            reducer.zero_grad()
            total_1 += loss.detach()
        communicator.sum_(total_1, label="training loss")
        seen, seconds = perplexity(total_1, len(training_N) - 1), time.monotonic() - start
        precision.require_progress((epoch + 1) * len(blocks), is_last=epoch + 1 == args.epochs)
        if not math.isfinite(seen):
            raise TrainingDiverged(f"the loss of epoch {epoch + 1} is not finite: lower --learning-rate")
        if rank == 0:
            found = f"perplexity {seen:.2f} in training, {evaluate(model, held_out):.2f} held out"
            rate = f"{seconds:.1f} s, {len(training_N) / seconds:,.0f} words/s"
            print(f"epoch {epoch + 1} of {args.epochs}: {found}; {rate}", flush=True)
    if rank == 0 and args.generate:
        print_line(generate(model, vocabulary, num_words=args.generate, seed=args.seed))


def main(words: Sequence[str] | None = None) -> int:
    """Run the script; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", choices=tuple(CELLS), default="lstm", help="the recurrent layer (lstm)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the weights (fp32)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training words (4)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of text, of all ranks together (16)")
    parser.add_argument("--learning-rate", type=float, default=0.03, help="at its peak (0.03)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights at the start (1)")
    parser.add_argument("--text", type=Path, default=NOVEL, metavar="FILE", help="to train on, in UTF-8 (a novel)")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="words to print after training (0)")
    args = parser.parse_args(words)
    if args.generate < 0:
        parser.error("--generate must not be negative")
    if not all(0 < value < math.inf for value in (args.epochs, args.batch_size, args.learning_rate)):
        parser.error("--epochs, --batch-size and --learning-rate must be positive numbers")
    try:
        communicator = bigbatch.connect()
        train(args, communicator)
    except UserError as error:
        print(f"language_model.py: {error}", file=sys.stderr)
        return 1
    communicator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
