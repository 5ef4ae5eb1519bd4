"""Which ids a reply may go on with: masks, drafts, thinking, ends, and other tokenizers."""

import itertools
import json
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from llguidance import LLParserLimits
from schemas import closed
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from walks import (
    DEMO_EOS,
    DEMO_VOCAB,
    GEMMA,
    allowed_ids,
    demo_tables,
    demo_tokenizer,
    problem,
    walk,
)

from mlx_worker.engine.constraint import Constraint
from mlx_worker.engine.grammar import GrammarTables, bits_of, has, unpacked
from mlx_worker.engine.structure import calls_grammar, structure_grammar
from mlx_worker.errors import GenerationFailed, RequestError
from mlx_worker.records import Grammar, Structure, TextProtocol, Tools

EOS, CALL, CALLED, THINK, THOUGHT = 1, 48, 49, 100, 101  # of the demo's tokenizer
MARKERS = {"think_open": THINK, "think_close": THOUGHT, "call_open": CALL}
POINT = closed(x={"type": "integer"}, y={"type": "string"})


def grammar_of(schema: Any, tools: Tools | None = None) -> Grammar:
    return structure_grammar(Structure(json.dumps(schema)), tools)[0]


def encoded(text: str) -> list[int]:
    return demo_tokenizer().encode(text, add_special_tokens=False)


def constraint_of(grammar: Grammar, **options: Any) -> Constraint:
    return Constraint(demo_tables(), grammar, **{**MARKERS, **options})


ONE_TOOL = Tools(({"type": "function", "function": {"name": "f", "parameters": POINT}},))
STRICT_TOOL = Tools(({"function": {"name": "f", "parameters": POINT, "strict": True}},))
MAY_CALL = grammar_of(POINT, ONE_TOOL)  # of a family whose calls can't be held
HELD_MAY_CALL = structure_grammar(Structure(json.dumps(POINT)), STRICT_TOOL, GEMMA)[0]
MUST_CALL = calls_grammar(replace(ONE_TOOL, is_required=True), GEMMA)[0]
HELD_CALLS = calls_grammar(STRICT_TOOL, GEMMA)[0]  # if any come

# Every place a reply can be at: how its constraint begins, and what it has written.
PLACES: dict[str, tuple[Grammar, dict[str, Any], list[int]]] = {
    "document": (grammar_of(POINT), {}, []),
    "within": (grammar_of(POINT), {}, encoded('{"x": 1')),
    "whole": (grammar_of({"type": "integer"}), {}, encoded("12")),
    "over": (grammar_of(POINT), {}, encoded('{"x":1,"y":"a"}')),
    "may think": (grammar_of(POINT), {"may_think": True}, []),
    "thinking": (grammar_of(POINT), {"may_think": True}, [THINK, 300]),
    "left thinking": (grammar_of(POINT), {"is_thinking": True}, []),
    "thought": (grammar_of(POINT), {"is_thinking": True}, [301, THOUGHT]),
    "may call": (MAY_CALL, {"may_think": True}, []),
    "thought, may call": (MAY_CALL, {"is_thinking": True}, [THOUGHT]),
    "calls": (MAY_CALL, {}, [CALL, 300]),
    "may call, held": (HELD_MAY_CALL, {"may_think": True}, []),
    "calls, held": (HELD_MAY_CALL, {"is_thinking": True}, [THOUGHT, CALL]),
    "within, held": (HELD_MAY_CALL, {}, encoded('{"x": 1')),
    "must call": (MUST_CALL, {}, [CALL]),
    "must call, may think": (MUST_CALL, {"may_think": True}, []),
    "says": (HELD_CALLS, {}, [300]),
    "thinks, may call": (HELD_CALLS, {}, [300, THINK, 301]),
    "calls in its thinking": (HELD_CALLS, {"is_thinking": True}, [300, CALL]),
    "must call in its thinking": (MUST_CALL, {"is_thinking": True}, [300, CALL]),
    "held, in its thinking": (HELD_MAY_CALL, {"may_think": True}, [THINK, 300, CALL]),
    "calls by itself": (HELD_CALLS, {"is_thinking": True}, [300, THOUGHT, 301, CALL]),
}


FORCING = (
    "calls in its thinking",
    "must call in its thinking",
    "held, in its thinking",
    "within",
    "within, held",
    "must call",
    "calls, held",
    "calls by itself",
)


def at(place: str) -> Constraint:
    grammar, options, written = PLACES[place]
    constraint = constraint_of(grammar, **options)
    constraint.advance(written)
    return constraint


def row_of(constraint: Constraint) -> np.ndarray:
    """What may come next, free places as all ids."""
    _, bits = constraint.rows()
    return demo_tables().all_ids if bits is None else bits[0]


def likely_ids(constraint: Constraint, generator: np.random.Generator, n: int) -> list[int]:
    """Drafts as a drafter proposes them: mostly legal, now and then anything."""
    ids: list[int] = []
    probe = constraint
    for _ in range(n):
        n_legal, bits = probe.rows(ids)
        row = demo_tables().all_ids if bits is None else bits[-1]
        markers = [EOS, CALL, THINK, THOUGHT]
        choices = allowed_ids(row, DEMO_VOCAB)
        if n_legal < len(ids) or generator.random() < 0.15:
            ids.append(int(generator.integers(DEMO_VOCAB)))
        elif generator.random() < 0.25 and (usual := [id for id in markers if id in set(choices)]):
            ids.append(int(generator.choice(usual)))
        else:
            ids.append(int(generator.choice(choices)))
    return ids


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", range(12))
def test_a_block_of_rows_equals_one_id_after_the_other(place: str, seed: int):
    """n and each row are what advancing by the drafts one by one gives, at every place."""
    generator = np.random.default_rng(seed)
    constraint, alone = at(place), at(place)
    drafts = likely_ids(constraint, generator, 8)
    n, bits = constraint.rows(drafts)
    expected = [row_of(alone)]
    for id in drafts:
        if not has(expected[-1], id):
            break
        alone.advance([id])
        expected.append(row_of(alone))
        if id in DEMO_EOS:
            break
    assert n == len(expected) - 1
    rows = np.stack(expected) if bits is None else bits
    assert np.array_equal(rows, np.stack(expected))


@pytest.mark.parametrize("place", PLACES)
def test_asking_changes_nothing(place: str):
    """Rows after any drafts, asked again, are the same; so are forced ids and completeness."""
    constraint = at(place)
    before = (row_of(constraint).copy(), constraint.forced(9), constraint.is_complete)
    for seed in range(10):
        constraint.rows(likely_ids(constraint, np.random.default_rng(seed), 7))
    assert np.array_equal(row_of(constraint), before[0])
    assert (constraint.forced(9), constraint.is_complete) == before[1:]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, DEMO_VOCAB + 40), max_size=8), st.sampled_from(sorted(PLACES)))
def test_any_ids_may_be_drafted(drafts: list[int], place: str):
    """Whatever a drafter proposes, the rows are those of its legal part."""
    constraint = at(place)
    n, bits = constraint.rows(drafts)
    assert n <= len(drafts)
    assert bits is None or len(bits) == n + 1
    if n < len(drafts) and bits is not None and not (n and drafts[n - 1] in DEMO_EOS):
        assert not has(bits[n], drafts[n])


def test_an_end_is_the_last_legal_draft():
    """What is drafted after an EOS is cut."""
    text = encoded('{"x":1,"y":"a"}')
    n, bits = constraint_of(grammar_of(POINT)).rows([*text, EOS, 300, 301])
    assert n == len(text) + 1
    assert bits is not None
    assert bits.shape == (n + 1, DEMO_VOCAB // 32)


def test_every_end_of_the_model_ends_a_document():
    """All EOS ids are allowed where the document is whole, none before."""
    ends = [
        DEMO_EOS & {int(id) for id in allowed_ids(row_of(at(p)), DEMO_VOCAB)}
        for p in ("within", "over")
    ]
    assert ends == [frozenset(), DEMO_EOS]


def test_only_an_end_follows_a_document_that_is_over():
    """After the last brace nothing else is legal."""
    assert set(map(int, allowed_ids(row_of(at("over")), DEMO_VOCAB))) == DEMO_EOS


@pytest.mark.parametrize(
    ("place", "is_complete"),
    [
        ("document", False),
        ("within", False),
        ("whole", True),
        ("over", True),
        ("thinking", False),
        ("thought", False),
        ("calls", True),
        ("must call", False),
        ("calls, held", False),
        ("within, held", False),
        ("says", True),
        ("thinks, may call", False),
        ("calls by itself", False),
    ],
)
def test_a_reply_knows_whether_it_is_whole(place: str, is_complete: bool):
    """True once it could end and satisfy what was asked."""
    assert at(place).is_complete is is_complete


@pytest.mark.parametrize(
    ("written", "was_whole"), [([], False), (encoded('{"x":1,"y":"a"}'), True)]
)
def test_an_ended_reply_knows_whether_it_was_whole(written: list[int], was_whole: bool):
    """An end in the midst of thinking leaves no document."""
    constraint = constraint_of(grammar_of(POINT), is_thinking=True)
    constraint.advance([300, *([THOUGHT, *written] if written else []), EOS])
    assert constraint.is_complete is was_whole
    assert constraint.rows([300]) == (1, None)


def test_thinking_may_come_before_a_document():
    """The first id may open it, nothing in it is bound, then the grammar holds from its start."""
    constraint = constraint_of(grammar_of(POINT), may_think=True)
    assert has(row_of(constraint), THINK)
    assert constraint.rows([THINK, 300, 301])[1] is not None
    constraint.advance([THINK, 300])
    assert constraint.rows([301]) == (1, None)
    constraint.advance([THOUGHT])
    assert not has(row_of(constraint), 300)
    assert not has(row_of(constraint), THINK)


def test_thinking_that_was_not_asked_for_can_not_be_opened():
    """Without may_think its marker is like any other id."""
    assert not has(row_of(constraint_of(grammar_of(POINT))), THINK)
    assert not has(
        row_of(constraint_of(grammar_of(POINT), may_think=True, think_close=None)), THINK
    )


def test_drafts_may_cross_from_thinking_into_the_document():
    """The rows after the closing marker are the grammar's, those before it free."""
    constraint = constraint_of(grammar_of(POINT), is_thinking=True)
    n, bits = constraint.rows([300, THOUGHT, *encoded('{"x"'), 300])
    assert n == 2 + len(encoded('{"x"'))
    assert bits is not None
    assert np.array_equal(bits[1], demo_tables().all_ids)
    assert not has(bits[2], 300)


def test_a_call_in_a_documents_place_is_free_to_its_end():
    """Its marker may be the first of the content only, and frees all that follows."""
    constraint = constraint_of(MAY_CALL)
    assert has(row_of(constraint), CALL)
    assert constraint.rows([CALL, 300, CALLED])[0] == 3
    constraint.advance([CALL])
    assert constraint.rows([300, 301]) == (2, None)
    assert not has(row_of(at("within")), CALL)
    begun = constraint_of(MAY_CALL)
    begun.advance(encoded("{"))
    assert not has(row_of(begun), CALL)


def test_a_call_that_comes_by_itself_is_held_from_its_marker_on():
    """Anything before it is free, thinking too, in which it may come as well."""
    constraint = constraint_of(HELD_CALLS)
    assert constraint.rows([300, THINK, 301, THOUGHT, 302]) == (5, None)
    assert constraint.rows([300, THINK, 301, CALL, 300])[0] == 4
    n, bits = constraint.rows([300, CALL, 300])
    assert n == 2
    assert bits is not None
    assert np.array_equal(bits[1], demo_tables().all_ids)
    constraint.advance([300, CALL])
    assert demo_tokenizer().decode(constraint.forced(20)).startswith("call:f{x")


def test_no_call_where_none_was_offered():
    """Without tools the marker is like any other id."""
    assert not has(row_of(constraint_of(grammar_of(POINT))), CALL)


def test_a_forced_run_is_what_the_schema_leaves_no_choice_about():
    """Here the rest of a key and what must follow, as the tokenizer would split it."""
    compact = grammar_of(closed(temperature={"const": "x"}))
    constraint = constraint_of(compact)
    constraint.advance(encoded('{"te'))
    ids = constraint.forced(20)
    text = demo_tokenizer().decode(ids)
    assert len(text) > 4
    assert 'mperature"'.startswith(text)
    assert constraint.forced(1) == ids[:1]
    assert constraint.forced(0) == []
    assert constraint.rows(ids)[0] == len(ids)


@pytest.mark.parametrize("place", [p for p in PLACES if p not in FORCING])
def test_nothing_is_forced_where_there_is_a_choice(place: str):
    """Not before a document that thinking may precede, not while it is free, never an end."""
    ids = at(place).forced(8)
    assert all(id not in DEMO_EOS for id in ids)
    if place not in ("document", "thought"):
        assert ids == []


def test_a_call_that_must_be_is_forced_by_its_markers():
    """Name and first key follow the opening marker by themselves."""
    ids = at("must call").forced(20)
    assert demo_tokenizer().decode(ids).startswith("call:f{x")


def test_an_id_that_is_not_allowed_fails_the_request_alone():
    """A clear error in one line; other replies under the same grammar go on."""
    constraint = constraint_of(grammar_of(POINT))
    with pytest.raises(GenerationFailed, match="grammar") as caught:
        constraint.advance([300])
    assert "\n" not in str(caught.value)
    with pytest.raises(GenerationFailed):
        constraint.rows()
    assert constraint_of(grammar_of(POINT)).rows()[1] is not None


def test_a_grammar_that_runs_into_a_limit_fails_clearly(monkeypatch: pytest.MonkeyPatch):
    """Masks of a matcher in error have no id; the reply fails before one is picked from them."""
    few = LLParserLimits(max_lexer_states=40, verbose_errors=False)
    monkeypatch.setattr("mlx_worker.engine.grammar.LIMITS", few)
    tables = GrammarTables(demo_tokenizer(), DEMO_VOCAB, DEMO_EOS, GEMMA)
    constraint = Constraint(tables, grammar_of({"type": "string", "pattern": "^[a-z]{900}$"}))
    with pytest.raises(GenerationFailed, match="held to its grammar"):
        constraint.rows(encoded('"' + "abc" * 100))


def test_a_control_token_of_another_model_is_refused():
    """A grammar of calls needs their markers among the tokens."""
    tables = GrammarTables(bytes_tokenizer(), 300, {0})
    with pytest.raises(RequestError, match="special token"):
        tables.matcher(MUST_CALL.text)


def test_a_tokenizer_that_can_not_be_read_is_told():
    """Slow ones have no file that says what each id's bytes are, and a file may be too new."""

    class Odd:
        class backend_tokenizer:
            to_str = staticmethod(lambda: '{"version": "1.0", "model": {"type": "new"}}')
            get_vocab = staticmethod(lambda with_added_tokens: {"a": 0})

    for tokenizer in (object(), Odd()):
        with pytest.raises(RequestError, match="this model's tokenizer"):
            GrammarTables(tokenizer, 8, {0})


def test_a_grammar_is_compiled_once():
    """Replies under one grammar share it, and each follows its own."""
    tables = GrammarTables(demo_tokenizer(), DEMO_VOCAB, DEMO_EOS, GEMMA)
    first, second = (Constraint(tables, grammar_of(POINT)) for _ in range(2))
    first.advance(encoded("{"))
    assert len(tables._compiled) == 1
    assert not np.array_equal(row_of(first), row_of(second))


def test_compiled_grammars_are_bounded():
    """The least recently used goes first."""
    tables = GrammarTables(demo_tokenizer(), DEMO_VOCAB, DEMO_EOS, GEMMA)
    grammars = [grammar_of({"const": n}) for n in range(40)]
    tables.matcher(grammars[0].text)
    first = tables._compiled[grammars[0].text]
    for grammar in grammars:
        tables.matcher(grammars[0].text)
        tables.matcher(grammar.text)
    assert len(tables._compiled) == 32
    assert tables._compiled[grammars[0].text] is first
    assert grammars[1].text not in tables._compiled


# Vocabularies


@pytest.mark.parametrize("extra", [0, 1, 31, 64, 200])
def test_ids_beyond_the_tokenizer_are_never_allowed(extra: int):
    """A model may have more ids than its tokenizer: no row has them, free ones neither."""
    tables = GrammarTables(demo_tokenizer(), DEMO_VOCAB + extra, DEMO_EOS, GEMMA)
    for grammar, options, written in PLACES.values():
        constraint = Constraint(tables, grammar, **{**MARKERS, **options})
        constraint.advance(written)
        _, bits = constraint.rows([THOUGHT])
        for row in [] if bits is None else bits:
            assert max(allowed_ids(row, tables.n_words * 32), default=0) < DEMO_VOCAB


def test_a_model_may_have_fewer_ids_than_its_tokenizer():
    """Ids that the model can't choose are in no row either."""
    tables = GrammarTables(demo_tokenizer(), 1000, DEMO_EOS, GEMMA)
    _, bits = Constraint(tables, grammar_of({"type": "string"})).rows(encoded('"'))
    assert bits is not None
    assert bits.shape[1] == 32
    assert 500 < len(allowed_ids(bits[1], 1024)) <= 1000
    assert max(allowed_ids(bits[1], 1024)) < 1000


def bytes_tokenizer(call: str = "<|tool_call>") -> Any:
    """SentencePiece's kind, as Gemma's: ▁ for a space, and bytes for what has no token."""
    control = ["<eos>", call]
    pieces = [*control, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", *'{}[]:,"01', "▁a", "ab", '":', '":▁', '{"']
    merges = [("▁", "a"), ("a", "b"), ('"', ":"), ('":', "▁"), ("{", '"')]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(call, special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def expected_bytes(tokenizer: Any, id: int) -> bytes:
    """What an id of that tokenizer writes."""
    piece = tokenizer.convert_ids_to_tokens(id)
    if piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def test_byte_ids_and_spaces_are_what_they_write():
    """Within a string, of a SentencePiece vocabulary exactly those ids that a string may have."""
    tokenizer = bytes_tokenizer()
    tables = GrammarTables(tokenizer, 310, {0})
    quote = tokenizer.convert_tokens_to_ids('"')
    _, bits = Constraint(tables, grammar_of({"type": "string"})).rows([quote])
    assert bits is not None
    pieces = {id: tokenizer.convert_ids_to_tokens(id) for id in range(258, len(tokenizer))}
    wanted = {id for id, piece in pieces.items() if piece not in ('":', '":▁')}
    wanted |= {2 + byte for byte in [*range(0x20, 0x7F), *range(0xC2, 0xF5)]}
    assert set(map(int, allowed_ids(bits[1], 310))) == wanted


@pytest.mark.parametrize("text", ["a b", "é☃", " a", "ab a", "x 😀 y"])
def test_a_text_may_be_split_as_the_tokenizer_does_or_finer(text: str):
    """Merged pieces and single ones, spaces and bytes: all lead through the same document."""
    tokenizer = bytes_tokenizer()
    document = json.dumps(text, ensure_ascii=False)
    ids = tokenizer.encode(document, add_special_tokens=False)
    fine = [id for char in document for id in tokenizer.encode(char, add_special_tokens=False)]
    assert b"".join(expected_bytes(tokenizer, id) for id in ids) == document.encode()
    for split in (ids, fine):
        constraint = Constraint(GrammarTables(tokenizer, 310, {0}), grammar_of({"type": "string"}))
        assert constraint.rows(split)[0] == len(split)
        constraint.advance(split)
        assert constraint.is_complete


@pytest.mark.parametrize("place", ["within", "must call", "document"])
def test_forced_ids_are_the_only_ones_that_masks_leave(place: str):
    """So a reply is the same whether they are written at once or chosen one by one."""
    constraint = at(place)
    ids = constraint.forced(20)
    _, bits = constraint.rows(ids)
    assert bits is not None
    assert [allowed_ids(row, DEMO_VOCAB).tolist() for row in bits[: len(ids)]] == [
        [id] for id in ids
    ]


def test_the_demos_ids_are_what_they_write():
    """Of a byte-level vocabulary too; a character of several ids can be written byte by byte."""
    text = '{"x": 1,\n  "y": "é☃ 😀"}'
    ids = encoded(text)
    constraint = constraint_of(grammar_of(POINT))
    assert constraint.rows(ids)[0] == len(ids)
    single = [encoded_byte(byte) for byte in text.encode()]
    assert constraint.rows(single)[0] == len(single)


def encoded_byte(byte: int) -> int:
    from mlx_worker.engine.text import _byte_letters

    letter = next(letter for letter, own in _byte_letters().items() if own == byte)
    return demo_tokenizer().convert_tokens_to_ids(letter)


@pytest.mark.parametrize("name", ["<|tool_call>", "[CALL]"])
def test_a_control_token_is_no_text(name: str):
    """Markers are in no string, also where the tokenizer's file does not call them special."""
    tokenizer = bytes_tokenizer(name)
    tables = GrammarTables(tokenizer, 310, {0}, TextProtocol("marked", call=(name, "")))
    quote = tokenizer.convert_tokens_to_ids('"')
    _, bits = Constraint(tables, grammar_of({"type": "string"})).rows([quote])
    assert bits is not None
    assert not has(bits[1], tokenizer.convert_tokens_to_ids(name))


# Texts that are spelled like control tokens

SPELLED = ["x<|tool_call>y", "x<|channel>y", "x<pad>y", "x<turn|>y", "<eos>", 'x<|"|>y']
FORCED: list[Any] = [
    *(closed(**{text: {"type": "integer"}}) for text in SPELLED),
    *({"const": text} for text in ("a <tool_call|> b", *SPELLED)),
    {"enum": ["x<|channel>y", "x<turn|>"]},
    {"type": "string", "pattern": r"^<\|channel>thought$"},
]


def markers_of(tokenizer: Any) -> set[int]:
    return {id for id, token in tokenizer.added_tokens_decoder.items() if "<" in token.content}


@pytest.mark.parametrize("schema", FORCED, ids=json.dumps)
def test_a_text_that_spells_a_control_token_is_written_as_text(schema: Any):
    """A document that must have it has it in ids of text alone, and keeps its schema."""
    grammar = grammar_of(schema)
    for seed in range(3):
        ids = walk(grammar, seed, 5)
        assert not markers_of(demo_tokenizer()) & set(ids)
        assert problem(schema, json.loads(demo_tokenizer().decode(ids))) is None


@pytest.mark.parametrize("schema", FORCED[len(SPELLED) : -1], ids=json.dumps)
def test_an_argument_that_spells_a_control_token_is_text(schema: Any):
    """Within a call its quotes are control tokens, and what stands between them is not."""
    tools = Tools(({"function": {"name": "f", "parameters": closed(a=schema)}},), True, None, False)
    grammar = calls_grammar(tools, GEMMA)[0]
    for seed in range(3):
        ids = walk(grammar, seed, 5)
        assert (ids[0], ids[-1]) == (CALL, CALLED)
        quotes = [n for n, id in enumerate(ids) if demo_tokenizer().decode([id]) == '<|"|>']
        assert len(quotes) == 2
        assert not markers_of(demo_tokenizer()) & set(ids[quotes[0] + 1 : quotes[1]])
        text = demo_tokenizer().decode(ids[quotes[0] + 1 : quotes[1]])
        assert problem(schema, text) is None


@pytest.mark.parametrize("name", ["<|tool_call>", "[CALL]", "a<b c>"])
def test_forced_ids_spell_control_tokens_as_text(name: str):
    """Of a SentencePiece vocabulary too, whatever the marker's name: forced, and by masks."""
    tokenizer = bytes_tokenizer(name)
    protocol = TextProtocol("marked", call=(name, ""))
    tables = GrammarTables(tokenizer, 310, {0}, protocol)
    for text in (f"x{name}y", "<eos>", name):
        constraint = Constraint(tables, grammar_of({"const": text}))
        ids: list[int] = []
        while not constraint.is_complete:
            forced = constraint.forced(20)
            _, bits = constraint.rows(forced[:1])
            assert bits is not None
            choices = allowed_ids(bits[0], 310).tolist()
            assert not set(choices) & {0, 1}
            assert not forced or forced[0] in choices
            ids += forced or choices[:1]
            constraint.advance(forced or choices[:1])
        assert b"".join(expected_bytes(tokenizer, id) for id in ids).decode() == json.dumps(text)


# Bits


@pytest.mark.parametrize(
    ("n_rows", "vocab_size"), list(itertools.product((1, 5), (1, 31, 32, 33, 2048)))
)
def test_bits_are_expanded_on_the_device(n_rows: int, vocab_size: int):
    """(rows, words) → (rows, V) bool, id by id."""
    generator = np.random.default_rng(vocab_size)
    flags = generator.random((n_rows, vocab_size)) < 0.5
    bits = np.stack([bits_of(np.flatnonzero(row).tolist(), vocab_size) for row in flags])
    found = unpacked(bits, vocab_size)
    assert found.dtype == mx.bool_
    assert np.array_equal(np.array(found), flags)


def test_a_set_of_ids_as_bits():
    """Bit i of word w is id 32 w + i."""
    assert bits_of([0, 33, 40], 64).tolist() == [1, 2 + 256]
    assert [id for id in range(70) if has(bits_of([0, 33, 63], 64), id)] == [0, 33, 63]


def test_a_call_that_must_be_is_all_that_is_written():
    """Random replies by masks from the first id on, of one call or several."""
    for seed in range(5):
        ids = walk(MUST_CALL, seed, 5)
        assert (ids[0], ids[-1]) == (CALL, CALLED)
