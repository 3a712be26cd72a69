"""Output text: stop strings across tokens, nothing sent that must be taken back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from iop.engine.generation import FinishReason, Stopping
from iop.engine.output import Ending, OutputText
from iop.engine.settings import builtin_checkpoint
from iop.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(builtin_checkpoint("first") / "tokenizer.json")
EOS = TOKENIZER.specials["<|end|>"]


def feed(
    tokens: list[int], stopping: Stopping, *, tokens_max: int = 1000
) -> tuple[list[str], Ending | None, int]:
    output = OutputText(TOKENIZER, stopping, eos_token_id=EOS, tokens_max=tokens_max)
    texts: list[str] = []
    for token in tokens:
        text, ending = output.push(token)
        texts.append(text)
        if ending is not None:
            return texts, ending, output.count
    return [*texts, output.rest()], None, output.count


def one_by_one(text: str) -> list[int]:
    """One token per byte: the hardest way to find a stop string."""
    return [TOKENIZER.encode("\0")[0] + byte for byte in text.encode()]


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_before_the_earliest_stop_is_sent_and_nothing_else(text: str, stops: list[str]) -> None:
    texts, ending, _ = feed(one_by_one(text), Stopping(stop=tuple(stops)))
    # Bytes come one by one, so the stop that is complete first wins.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert ending is None
        assert "".join(texts) == text
        return
    end = min(ends)
    longest = max((stop for stop in stops if text[:end].endswith(stop)), key=len)
    assert ending is not None
    assert ending.stop is not None
    assert ending.stop.text == longest
    assert "".join(texts) == text[: end - len(longest)]


def test_a_possible_stop_is_held_until_it_is_none() -> None:
    texts, _, _ = feed(one_by_one("xENy"), Stopping(stop=("END",)))
    assert texts == ["x", "", "", "ENy", ""]


def test_length_releases_what_was_held() -> None:
    texts, ending, count = feed(one_by_one("xEN"), Stopping(stop=("END",)), tokens_max=3)
    assert "".join(texts) == "xEN"
    assert (ending, count) == (Ending(reason=FinishReason.LENGTH), 3)


def test_end_mark_and_stop_tokens_have_no_text() -> None:
    word = TOKENIZER.encode("fox")
    texts, ending, _ = feed([*word, EOS], Stopping())
    assert "".join(texts) == "fox"
    assert ending is not None
    assert ending.stop is not None
    assert ending.stop.eos_token_id == EOS
    texts, ending, _ = feed([*word, word[-1]], Stopping(stop_token_ids=(word[-1],)))
    assert ending is not None
    assert ending.stop is not None
    assert ending.stop.token_id == word[-1]


def test_ignored_end_mark_does_not_end() -> None:
    _, ending, count = feed([EOS, EOS], Stopping(ignore_eos=True))
    assert (ending, count) == (None, 2)


def test_below_min_tokens_endings_are_banned() -> None:
    output = OutputText(
        TOKENIZER, Stopping(min_tokens=1, stop_token_ids=(7,)), eos_token_id=EOS, tokens_max=9
    )
    assert set(output.banned()) == {EOS, 7}
    output.push(300)
    assert output.banned() == ()
