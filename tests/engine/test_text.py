"""Text comes as whole characters, all of it, and stops exactly where it should."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper, load
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_worker.engine import text as text_module
from mlx_worker.engine.checkpoint import DEMO_FOLDER
from mlx_worker.engine.text import REPLACEMENT, StopCutter, TextStream
from mlx_worker.records import Sampling
from tests.tiny import VOCAB, Guess, tiny_pair, tiny_tokenizer, write

PROMPT = [2, *range(40, 51)]
CHARACTERS = ["é", "e\u0301", "漢", "€", "😀", "👩\u200d🚀", "🇫🇷", "\u0e01\u0e33"]


@cache
def byte_fallback() -> TokenizerWrapper:
    """A few words, and bytes as ids 4…259 for everything else: the kind Gemma has."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["a", "b", "c", "▁", "ab", "▁a"]
    merges = [("a", "b"), ("▁", "a")]
    vocabulary = {name: i for i, name in enumerate(names)}
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>"])
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>"))


@cache
def demo() -> TokenizerWrapper:
    return load(DEMO_FOLDER / "target")


class Slow:
    """A tokenizer without a fast core: only `decode`, which notes how much it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.sizes: list[int] = []

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self.sizes.append(len(ids))
        return self._tokenizer.decode(ids, **options)


KINDS = {
    "byte-level": tiny_tokenizer,
    "byte fallback": byte_fallback,
    "slow": lambda: Slow(tiny_tokenizer()),
}


def encode(tokenizer: Any, text: str) -> list[int]:
    core = tokenizer._tokenizer if isinstance(tokenizer, Slow) else tokenizer
    return core.encode(text, add_special_tokens=False)


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each id completes, and last what the end releases."""
    stream = TextStream(tokenizer)
    return [*(stream.push(id) for id in ids), stream.finish()]


def whole(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# --- characters -------------------------------------------------------------------------------


@pytest.mark.parametrize("character", CHARACTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_character_split_over_ids_is_held_back_until_it_is_whole(kind: str, character: str):
    """No replacement character ever shows, and the last byte brings the character at once."""
    tokenizer = KINDS[kind]()
    ids = encode(tokenizer, character)
    assert len(ids) > 1
    shown = pieces(tokenizer, ids)
    assert "".join(shown) == character
    assert REPLACEMENT not in "".join(shown)
    assert shown[-2] != ""
    assert shown[-1] == ""


def test_text_before_an_unfinished_character_is_not_held_back():
    """One id may end a word and begin a character: the word shows at once."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "Ġâ"]  # a space and the first of three bytes
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [("Ġ", "â")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    assert pieces(tokenizer, encode(tokenizer, "x €")) == ["x", " ", "", "€", ""]


@pytest.mark.parametrize("kind", ["byte-level", "slow"])
def test_broken_bytes_at_the_end_are_flushed_once(kind: str):
    """As the tokenizer decodes them, and a second finish adds nothing."""
    tokenizer = KINDS[kind]()
    ids = encode(tokenizer, "ok") + encode(tokenizer, "€")[:2]
    stream = TextStream(tokenizer)
    assert [stream.push(id) for id in ids] == ["o", "k", "", ""]
    assert (stream.finish(), stream.finish()) == (REPLACEMENT, "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_replacement_character_that_was_written_is_text(kind: str):
    """U+FFFD is a character like others, at the end too."""
    tokenizer = KINDS[kind]()
    for text in ("a\ufffdb", "a\ufffd", "\ufffd\ufffda\ufffd"):
        assert "".join(pieces(tokenizer, encode(tokenizer, text))) == text


def test_a_finished_stream_of_nothing_is_empty():
    """A reply may be one EOS."""
    assert TextStream(tiny_tokenizer()).finish() == ""


# --- all of it --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "n_ids"),
    [(tiny_tokenizer, VOCAB), (demo, 2048), (lambda: Slow(demo()), 2048)],
    ids=["bytes", "demo", "slow demo"],
)
def test_the_pieces_are_the_whole_text(tokenizer: Any, n_ids: int):
    """Random ids, broken bytes and control tokens among them, equal one decode of all."""
    tokens = tokenizer()
    chance = random.Random(1)
    for _ in range(200):
        ids = [
            chance.randrange(n_ids) if chance.random() < 0.8 else chance.randrange(110)
            for _ in range(chance.randint(1, 30))
        ]
        assert "".join(pieces(tokens, ids)) == whole(tokens, ids)


def test_the_pieces_are_the_whole_text_where_bytes_are_the_fallback():
    """Random well-formed text, cut wherever the ids cut it."""
    chance = random.Random(2)
    letters = ["a", "b", " ", "ab", " a", "z", "\n", *CHARACTERS]
    for _ in range(200):
        text = "".join(chance.choice(letters) for _ in range(12))
        ids = encode(byte_fallback(), text)
        assert "".join(pieces(byte_fallback(), ids)) == text


def test_broken_bytes_neither_end_the_reply_nor_swallow_the_rest():
    """Where bytes are the fallback, the library's stream used to raise "Invalid prefix" here."""
    tokenizer = byte_fallback()
    a, b, c = (tokenizer.convert_tokens_to_ids(name) for name in ("ab", "<0x62>", "c"))
    broken = tokenizer.convert_tokens_to_ids("<0xE6>")
    assert pieces(tokenizer, [a, b, broken, c, c]) == ["ab", "b", "", "\ufffdc", "c", ""]


def test_broken_bytes_after_text_are_not_lost():
    """They used to vanish where they changed how the byte before them decodes."""
    tokenizer = byte_fallback()
    ids = [tokenizer.convert_tokens_to_ids(name) for name in ("<0x3E>", "<0xB9>", "<0xEE>")]
    assert "".join(pieces(tokenizer, ids)) == ">\ufffd\ufffd"


def test_no_ids_can_break_the_stream():
    """Any sequence at all, ids without a token included."""
    chance = random.Random(3)
    for _ in range(300):
        ids = [chance.randrange(270) for _ in range(12)]
        shown = pieces(byte_fallback(), [*ids, *encode(byte_fallback(), "ab")])
        assert "".join(shown).endswith("ab")


def test_decoding_one_more_id_does_not_read_the_reply_again():
    """The work for an id does not grow with the reply."""
    slow = Slow(tiny_tokenizer())
    assert "".join(pieces(slow, encode(slow, "Hällo 😀 " * 100))) == "Hällo 😀 " * 100
    assert max(slow.sizes) <= 10


def test_endless_broken_bytes_do_not_make_the_work_grow():
    """A model that writes nothing but half characters is shown as what it is."""
    slow = Slow(tiny_tokenizer())
    ids = encode(slow, "é")[:1] * 1000
    assert "".join(pieces(slow, ids)) == REPLACEMENT * 1000
    assert max(slow.sizes) <= 2 * text_module.MAX_WAITING_IDS


def test_a_tokenizer_that_rewrites_its_text_is_obeyed():
    """Its own decode counts, not its core's: newlines used to come out as <n>."""
    core = Tokenizer(models.WordLevel({"<n>": 0, "word": 1}, unk_token="word"))
    tokenizer = NewlineTokenizer(tokenizer_object=core)
    assert "".join(pieces(tokenizer, [1, 0])) == whole(tokenizer, [1, 0]) == "word \n"


def test_the_kinds_of_tokenizers_come_from_disk_as_in_memory(tmp_path: Path):
    """What is tested above is what a user's folder gives."""
    byte_fallback().save_pretrained(tmp_path)
    ids = encode(byte_fallback(), "ab 漢😀 a")
    assert pieces(load(tmp_path), ids) == pieces(byte_fallback(), ids)


# --- stop strings -----------------------------------------------------------------------------


def cut(stops: Sequence[str], *texts: str) -> tuple[list[str], str, bool]:
    """(what each push shows, what the end releases, whether a stop was hit)."""
    cutter = StopCutter(stops)
    shown = [cutter.push(text) for text in texts]
    return shown, cutter.flush(), cutter.hit


@pytest.mark.parametrize(
    ("stops", "texts", "expected"),
    [
        (["END"], ["say E", "ND now"], (["say ", ""], "", True)),  # across two pieces
        (["END"], ["say END now"], (["say "], "", True)),  # inside one, text after it
        (["END"], ["E", "N", "D"], (["", "", ""], "", True)),  # the whole reply
        (["END"], ["the E", "N", "!"], (["the ", "", "EN!"], "", False)),  # nearly
        (["END"], ["the EN"], (["the "], "EN", False)),  # held back, released at the end
        (["aab"], ["aa", "ab"], (["", "a"], "", True)),  # the end of one try begins the next
        (["no", "END"], ["END", "no"], (["", ""], "", True)),  # the earliest wins
        (["d", "abcd"], ["ab", "cd"], (["", ""], "", True)),  # ending together, the longer wins
        (["bc", "abcd"], ["abcd"], (["a"], "", True)),  # complete first wins
        ([], ["abc"], (["abc"], "", False)),
    ],
)
def test_stops(stops: list[str], texts: list[str], expected: tuple[list[str], str, bool]):
    """Text before the stop shows, the stop and what follows never, half of one neither."""
    assert cut(stops, *texts) == expected


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop that is complete first, by definition; None without one."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


def test_the_result_does_not_depend_on_how_the_text_is_cut():
    """Of two overlapping stops, which one won used to depend on the pieces."""
    chance = random.Random(4)
    for _ in range(2000):
        text = "".join(chance.choice("aab") for _ in range(10))
        stops = ["".join(chance.choice("ab") for _ in range(chance.randint(1, 4))) for _ in "123"]
        cuts = sorted(chance.choices(range(11), k=3))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 10], strict=True)]
        shown, rest, hit = cut(stops, *parts)
        expected = first_stop(text, stops)
        assert "".join(shown) + rest == (text if expected is None else expected)
        assert hit == (expected is not None)


# --- stops inside a reply ---------------------------------------------------------------------


@cache
def letters_only() -> Sampling:
    """Sampling that leaves only plain letters, so that any part of the reply can be a stop."""
    letters = set(encode(tiny_tokenizer(), "abcdefghijklmnopqrstuvwxyz"))
    others = tuple(id for id in range(VOCAB) if id not in letters)
    return Sampling(temperature=1.0, frequency_penalty=1.5, seed=7, logprobs=1, suppress_ids=others)


@cache
def free() -> Any:
    """The reply without a stop, for its text and its ids."""
    return write(tiny_pair("own"), PROMPT, 32, sampling=letters_only(), ignore_eos=True)


def stopped(stop: str, depth: int, draft: str | None = None) -> Any:
    """The same reply with a stop; without a draft's name, drafts are nearly all right."""
    reply = free().ids
    return write(
        tiny_pair("own", draft),
        PROMPT,
        32,
        drafter=Guess(reply, lambda i: i % 7 != 1) if draft is None else None,
        sampling=letters_only(),
        ignore_eos=True,
        stop=(stop,),
        speculation="on",
        depth=depth,
    )


def some_stop(length: int) -> str:
    """A part of the reply's text that occurs once, well inside it; each letter is one id."""
    text = free().text
    spans = [text[i : i + length] for i in range(8, len(text))]
    return next(span for span in spans if text.count(span) == 1)


@pytest.mark.parametrize("draft", [None, "lookup", "assistant", "other_seed"])
@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("length", [2, 5])
def test_a_reply_ends_at_the_id_that_completes_the_stop(length: int, depth: int, draft: str | None):
    """Ids, text, count and reason alike for every drafter and depth."""
    stop = some_stop(length)
    reply, n = stopped(stop, depth, draft), free().text.index(stop) + length
    assert reply.ids == free().ids[:n]
    assert reply.text == free().text.split(stop)[0]
    assert reply.done.usage.completion_tokens == n
    assert reply.done.finish_reason == "stop"


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_every_kept_id_of_a_cut_round_has_its_logprob_and_no_other(depth: int):
    """Those of drafts behind the stop are dropped with the drafts."""
    reply = stopped(some_stop(2), depth)
    assert [entry.id for entry in reply.logprobs] == reply.ids
    expected = [entry.logprob for entry in free().logprobs[: len(reply.ids)]]
    assert [entry.logprob for entry in reply.logprobs] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("depth", [0, 4])
def test_what_looked_like_a_stop_is_released_at_the_end(depth: int):
    """A reply that ends inside a would-be stop shows all its text."""
    never = free().text[-2:] + "!"
    assert stopped(never, depth).text == free().text
