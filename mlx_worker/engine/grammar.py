"""Grammars over a model's ids: which ids may come next.

Owns the tokenizer's tables, made once for a model, compiled grammars, and masks as bits. Leaves
writing grammars to structure.py and following a reply to constraint.py. Engine thread only.
"""

import json
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from mlx_worker.engine.calls import sealed
from mlx_worker.engine.structure import LIMITS, first_line
from mlx_worker.errors import RequestError
from mlx_worker.records import TextProtocol

MAX_COMPILED = 32
WORD_BITS = 32

Bits = np.ndarray[
    Any, np.dtype[np.uint32]
]  # (words,) or (rows, words): bit i of word w is id 32w+i


class GrammarTables:
    """What masks of one model are made with.

    5 s and 200 MB at 262,144 ids, 25 ms at 2,048 (one core of an EPYC): made when a grammar is
    first asked for. A row takes 0.1 ms, a block of four after three drafts 0.1 to 0.3.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_ids: Collection[int],
        protocol: TextProtocol | None = None,
    ) -> None:
        """
        tokenizer   mlx-lm's wrapper or the Hugging Face one
        vocab_size  of the model; it may have ids that no token belongs to
        protocol    its markers become control tokens, which no text can spell

        Raises RequestError where the tokenizer is of a kind that can't be read.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise _unreadable("it is no fast one")
        spec = json.loads(backend.to_str())
        tokens = backend.get_vocab(with_added_tokens=True)
        n_tokens = max(tokens.values()) + 1
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(id for id in eos_ids if id < vocab_size)
        self.n_words = (vocab_size + WORD_BITS - 1) // WORD_BITS
        self._n_known = max(n_tokens, vocab_size)
        text = json.dumps(_with_controls(spec, protocol, self.eos_ids))
        try:
            self._tokenizer = LLTokenizer(text, self._n_known, sorted(self.eos_ids))
        except ValueError as error:
            raise _unreadable(first_line(str(error))) from error
        self.all_ids = bits_of([id for id in tokens.values() if id < vocab_size], vocab_size)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the grammar's beginning, the caller's own.

        Raises RequestError for a grammar that this tokenizer has no tokens for, or that is too
        large with it.
        """
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
            if compiled.is_error():
                raise _unusable(compiled.get_error())
        self._compiled[grammar] = compiled
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def mask(self, matcher: LLMatcher) -> Bits:
        """(words,) the ids that may come next; nothing where the matcher is in error."""
        row = np.zeros(-(-self._n_known // WORD_BITS), np.uint32)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return row[: self.n_words] & self.all_ids


def _unreadable(why: str) -> RequestError:
    return RequestError(
        f"this model's tokenizer is of a kind that no grammar can be followed with: {why}",
        hint="ask without response_format and with tool_choice auto",
    )


def _unusable(message: str) -> RequestError:
    return RequestError(
        f"the grammar can't be followed with this model's tokenizer: {first_line(message)}",
        hint="simplify the schema, or ask with tool_choice auto",
    )


def _with_controls(
    spec: dict[str, Any], protocol: TextProtocol | None, eos_ids: Collection[int]
) -> dict[str, Any]:
    """The tokenizer's file with each control token marked so, under a name that no text spells.

    llguidance takes an added token in angle brackets for one, whatever the file says.
    """
    named: set[str] = set()
    if protocol is not None:
        pairs = [pair for pair in (protocol.thinking, protocol.call) if pair]
        named = {*(marker for pair in pairs for marker in pair), *protocol.others}
    renamed: dict[str, str] = {}
    for token in spec.get("added_tokens", []):
        text = token["content"]
        is_bracketed = text.startswith("<") and text.endswith(">")
        if token["special"] or is_bracketed or text in named or token["id"] in eos_ids:
            token["special"] = True
            token["content"] = renamed[text] = sealed(text)
    model = spec["model"]
    vocab = model.get("vocab", {})
    if isinstance(vocab, dict):
        model["vocab"] = {renamed.get(piece, piece): id for piece, id in vocab.items()}
    else:
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    return {**spec, "padding": None, "truncation": None, "post_processor": None}


def bits_of(ids: Collection[int], vocab_size: int) -> Bits:
    """(words,) a set of ids as bits."""
    n_words = (vocab_size + WORD_BITS - 1) // WORD_BITS
    flags = np.zeros(n_words * WORD_BITS, np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view("<u4")


def has(row: Bits, id: int) -> bool:
    """Whether a row of bits has an id."""
    word, bit = divmod(id, WORD_BITS)
    return 0 <= word < len(row) and bool(int(row[word]) >> bit & 1)


def unpacked(bits: Bits, vocab_size: int) -> mx.array:
    """(rows, words) bits → (rows, V) bool on the device, expanded there."""
    words = mx.array(bits)[:, :, None]
    shifts = mx.arange(WORD_BITS, dtype=mx.uint32)
    flags = mx.bitwise_and(mx.right_shift(words, shifts), mx.array(1, mx.uint32))
    return flags.reshape(len(bits), -1)[:, :vocab_size].astype(mx.bool_)
