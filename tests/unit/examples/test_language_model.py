"""The parts of examples/language_model.py: words, blocks and perplexities, by hand. tests/parallel trains with it."""

import math
from pathlib import Path

import pytest
import torch

from bigbatch.errors import ConfigError
from examples import language_model


def test_words_are_numbered_by_how_often_they_occur(tmp_path: Path) -> None:
    novel = tmp_path / "novel.txt"
    novel.write_text("It's a man, a dog\nand A man--it's\n\nodd , a cat and a man; dog cat")  # 20 words
    training_N, held_out_N, vocabulary = language_model.read_words(novel)
    # a: 5 times; then, in the order of the text, it's: 2, man: 3, ",": 2, and: 2; dog, --, odd, cat, ;: once
    assert training_N.tolist() == [3, 1, 2, 4, 1, 0, 5, 1, 2, 0, 3, 0, 4, 1, 0, 5, 1, 2]
    assert held_out_N.tolist() == [2, 0, 0, 0]
    assert vocabulary == ["<unknown>", "a", "man", "it's", ",", "and"]


@pytest.mark.parametrize(
    ("content", "told"), [(b"\xff\xfe", "UTF-8"), (b"a b " * 100, "has 200 words, but 201"), (None, "No such")]
)
def test_texts_that_cannot_be_trained_on(content: bytes | None, told: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        language_model.read_words(text, min_words=201)


def test_generated_words_follow_the_model() -> None:
    """A model that makes each word's successor certain: the text is the cycle, and never the unknown word."""
    model = language_model.WordModel(4, cell="elman")
    after = {0: 1, 1: 2, 2: 3, 3: 1}

    def predict(words_RT: torch.Tensor, state: object) -> tuple[torch.Tensor, object]:
        logits_V = torch.full((4,), -1e4)
        logits_V[after[int(words_RT)]], logits_V[0] = 0.0, 1e4
        return logits_V.view(1, 1, 4), state

    model.predict = predict  # type: ignore[method-assign, assignment]
    told = language_model.generate(model, ["<unknown>", "one", "two", "."], num_words=7, seed=0)
    assert told == "one two. one two. one"


@pytest.mark.parametrize("num_words", [2, 65, 66, 1000])
@pytest.mark.parametrize("num_rows", [1, 4, 7])
def test_words_but_the_first_are_targets_once(num_words: int, num_rows: int) -> None:
    blocks = language_model.make_blocks(torch.arange(num_words) + 5, num_rows=num_rows)
    inputs_RL, targets_RL = (torch.cat(part, dim=1) for part in zip(*blocks, strict=True))
    assert inputs_RL.shape[0] == num_rows
    targets_N = targets_RL.flatten()
    is_word_N = targets_N != language_model.IGNORED
    assert targets_N[is_word_N].tolist() == list(range(6, num_words + 5))
    assert torch.equal(inputs_RL.flatten()[is_word_N], targets_N[is_word_N] - 1)
    assert sum(map(language_model.num_targets, blocks)) == num_words - 1
    assert {block[0].shape[1] for block in blocks[:-1]} <= {language_model.STEP_WORDS}


@pytest.mark.parametrize("num_rows", [1, 16])
def test_perplexity_of_a_model_that_knows_nothing_is_the_number_of_words(num_rows: int) -> None:
    model = language_model.WordModel(50)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    blocks = language_model.make_blocks(torch.arange(50).repeat(3), num_rows=num_rows)
    assert language_model.evaluate(model, blocks) == pytest.approx(50, rel=1e-6)


@pytest.mark.parametrize("cell", language_model.CELLS)
def test_the_state_goes_from_block_to_block(cell: str) -> None:
    """In one row, cutting into steps changes nothing: the loss is that of the text in one piece."""
    torch.manual_seed(1)
    model = language_model.WordModel(20, cell=cell)
    words_N = torch.randint(20, (101,))
    whole = model((words_N[None, :-1], words_N[None, 1:]), None)[0].item()
    blocks = language_model.make_blocks(words_N, num_rows=1)
    assert len(blocks) == 4
    assert language_model.evaluate(model, blocks) == pytest.approx(math.exp(whole / 100), rel=1e-5)


@pytest.mark.parametrize("cell", language_model.CELLS)
def test_gradients_reach_no_further_back_than_a_block(cell: str) -> None:
    model = language_model.WordModel(20, cell=cell)
    words_N = torch.randint(20, (65,), generator=torch.Generator().manual_seed(0))
    first, second = language_model.make_blocks(words_N, num_rows=1)
    _, state = model(first, None)
    states = state if isinstance(state, tuple) else (state,)
    assert len(states) == (2 if cell == "lstm" else 1)
    assert not any(tensor.requires_grad for tensor in states)
    model(second, state)[0].backward()


def test_cells_are_those_of_their_papers_by_size() -> None:
    """Gates of an Elman network, a GRU and an LSTM: 1, 3 and 4, each of a square matrix of inputs and one of states."""
    sizes = {
        cell: sum(p.numel() for p in language_model.WordModel(7, cell=cell).recurrent.parameters())
        for cell in language_model.CELLS
    }
    gate = 2 * language_model.WIDTH**2 + 2 * language_model.WIDTH
    assert sizes == {"elman": gate, "gru": 3 * gate, "lstm": 4 * gate}


def test_perplexity_of_unigrams_by_hand() -> None:
    training_N, held_out_N = torch.tensor([1, 1, 1, 2, 2]), torch.tensor([1, 1, 2, 0])
    # (3 + 1, 2 + 1 and 0 + 1) / 8 for words 1, 2 and 0; the first held-out word is only context
    expected = (4 / 8 * 3 / 8 * 1 / 8) ** (-1 / 3)
    assert language_model.unigram_perplexity(training_N, held_out_N, 3) == pytest.approx(expected)


def test_the_novel_is_whole_and_plain() -> None:
    text = language_model.NOVEL.read_text(encoding="ascii")
    assert text.startswith("Letter 1\n")
    assert text.endswith("lost in darkness and distance.\n")
    assert [line for line in text.splitlines() if line.startswith("Chapter")] == [f"Chapter {n}" for n in range(1, 25)]


@pytest.mark.parametrize("setting", ["--epochs=0", "--batch-size=-1", "--learning-rate=nan", "--learning-rate=inf"])
def test_settings_out_of_range(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        language_model.main([setting])
    assert "--epochs, --batch-size and --learning-rate" in capsys.readouterr().err
