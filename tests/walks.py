"""Random replies under a grammar, each id drawn from what its masks allow; and what judges them.

A walk draws uniformly for a while and then prefers what closes, so that it ends.
"""

import datetime
import ipaddress
import re
import uuid
from collections.abc import Mapping
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import jsonschema.validators
import numpy as np

from mlx_worker.engine.checkpoint import DEMO_FOLDER, Checkpoint
from mlx_worker.engine.constraint import Constraint
from mlx_worker.engine.grammar import GrammarTables
from mlx_worker.engine.weights import read_tokenizer
from mlx_worker.records import Grammar, TextProtocol

DEMO_VOCAB = 2048
DEMO_EOS = frozenset({1, 50, 106})
GEMMA = TextProtocol(
    "gemma4", thinking=("<|channel>", "<channel|>"), call=("<|tool_call>", "<tool_call|>")
)
CLOSING = ['<|"|>', '"', "@", "}", "]", "<tool_call|>", *"0123456789", *"tfnZE:-.abcdefA{[,"]
MOST_IDS = 500
FORMATS = jsonschema.FormatChecker(formats=())


@cache
def demo_tokenizer() -> Any:
    return read_tokenizer(Checkpoint(DEMO_FOLDER / "target"))


@cache
def demo_tables() -> GrammarTables:
    return GrammarTables(demo_tokenizer(), DEMO_VOCAB, DEMO_EOS, GEMMA)


def allowed_ids(row: np.ndarray, vocab_size: int) -> np.ndarray:
    """The ids of one row of bits."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size])


@cache
def closing_ids() -> tuple[int, ...]:
    vocabulary = demo_tokenizer().get_vocab()
    return tuple(vocabulary[text] for text in CLOSING if text in vocabulary)


def walk(grammar: Grammar, seed: int, n_free: int, **markers: Any) -> list[int]:
    """Ids of a random reply that ended where the grammar let it; without its end."""
    constraint = Constraint(demo_tables(), grammar, **markers)
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    while len(ids) < MOST_IDS:
        _, bits = constraint.rows()
        assert bits is not None
        allowed = allowed_ids(bits[0], DEMO_VOCAB)
        assert len(allowed), "a reply that can neither go on nor end"
        id = _drawn(allowed, generator, is_closing=len(ids) >= n_free)
        if id in DEMO_EOS:
            assert constraint.is_complete
            return ids
        constraint.advance([id])
        ids.append(id)
    raise AssertionError(f"no end: {demo_tokenizer().decode(ids)[:200]!r}")


def _drawn(allowed: np.ndarray, generator: np.random.Generator, is_closing: bool) -> int:
    choices = set(map(int, allowed))
    if is_closing:
        if ends := choices & DEMO_EOS:
            return min(ends)
        closing = [id for id in closing_ids() if id in choices]
        if closing and generator.random() < 0.9:
            return closing[0]
    return int(generator.choice(allowed))


def problem(schema: Mapping[str, Any], value: Any) -> str | None:
    """What jsonschema says is wrong with a value, formats included."""
    cls: Any = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    errors = cls(schema, format_checker=FORMATS).iter_errors(value)
    return next((error.message[:200] for error in errors), None)


def _is(name: str, pattern: str) -> None:
    FORMATS.checks(name)(lambda value: not isinstance(value, str) or _matches(pattern, value))


def _matches(pattern: str, value: str) -> bool:
    return re.fullmatch(pattern, value) is not None


def _reads(name: str, read: Any) -> None:
    def check(value: object) -> bool:
        return not isinstance(value, str) or read(value) is not None

    FORMATS.checks(name, raises=ValueError)(check)


# As other libraries read them; jsonschema itself knows half of them only with further packages.
_reads("date", datetime.date.fromisoformat)
_reads("time", datetime.time.fromisoformat)
_reads("date-time", datetime.datetime.fromisoformat)
_reads("ipv4", ipaddress.IPv4Address)
_reads("ipv6", ipaddress.IPv6Address)
_reads("uuid", uuid.UUID)
_reads("uri", lambda value: urlsplit(value).scheme or None)
_is("email", r"[^@\s]{1,}@[A-Za-z0-9.-]{1,255}")
_is("hostname", r"(?=.{1,255}$)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9-]{1,63})*")
_is("duration", r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)")
