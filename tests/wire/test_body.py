"""Bytes → JSON values: both readers agree, and what would cost others their time is refused."""

import json
import threading
import time

import pytest

from mlx_worker.errors import RequestError
from mlx_worker.wire import body
from mlx_worker.wire.body import read_json

TEXTS = [
    '{"a": [1, -2.5e3, true, null, "x\\u00e9\\n"], "b": {"": {}}, "a": []}',
    "[]",
    '"text"',
    "  12 ",
    "",
    "[1,",
    '{"a" 1}',
    "[1] 2",
    "[NaN]",
    '["\\ud800"]',
    "[" * 100_000,
    "[" + "9" * 5000 + "]",
]


def read(text: str) -> tuple[str, object]:
    try:
        return "value", read_json(text.encode())
    except RequestError as error:
        return "error", str(error)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:20])
def test_the_reader_that_gives_way_reads_the_same(text: str, monkeypatch: pytest.MonkeyPatch):
    """Values and errors, word by word."""
    fast = read(text)
    monkeypatch.setattr(body, "MANY_VALUES", -1)
    assert read(text) == fast


def test_a_body_with_too_many_values_is_refused_unread():
    """It used to hold up every client for a second or more: no other thread ran meanwhile."""
    began = time.thread_time()
    with pytest.raises(RequestError, match=r"5,592,402 commas and brackets, 500,000"):
        read_json(b"[" + b"[]," * 2_796_200 + b"[]]")
    assert time.thread_time() - began < 0.05


def test_others_run_while_a_body_with_many_values_is_read():
    """In its own thread: this one is never kept from running for long."""
    many = json.dumps([[]] * 200_000).encode()
    reader = threading.Thread(target=read_json, args=(many,))
    turns = 0
    reader.start()
    while reader.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 5
