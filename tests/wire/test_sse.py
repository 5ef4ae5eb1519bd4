"""Values become bytes that any reader of JSON and of server-sent events takes apart again."""

import json
import math
import threading
import time
from typing import Any

import pytest

from mlx_worker.wire.sse import DONE, json_bytes, json_bytes_by_pieces, sse_event


def test_an_event_is_one_line_and_an_empty_one():
    """Line breaks of the text are escaped, so they don't end the event."""
    assert sse_event({"a": "\n\r\n"}) == b'data: {"a":"\\n\\r\\n"}\n\n'


def test_the_end_is_openais():
    """The one event that is no JSON."""
    assert DONE == b"data: [DONE]\n\n"


@pytest.mark.parametrize("text", ["é€", "\u2028", "\x00", "\U0001f40b", "\udc80", '"\\'])
def test_any_text_comes_back(text: str):
    """Half a surrogate pair too: a broken file name in a message must not break the reply."""
    assert json.loads(json_bytes([text])) == [text]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_json_cannot_write_is_not_written(value: float):
    """A client must not get a body that it can't read."""
    with pytest.raises(ValueError, match="JSON compliant"):
        json_bytes(value)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"choices": [{"logprobs": {"content": [{"token": "é", "logprob": -0.5, "top": [{}]}]}}]},
        [[[[[[[1, None, True, "\n", "\udcff"]]]]]]],
        "text",
    ],
)
def test_pieces_are_the_same_bytes(value: Any):
    """However deep a value is."""
    assert json_bytes_by_pieces(value) == json_bytes(value)


def test_others_run_while_a_reply_of_many_values_is_written():
    """A second's worth of logprobs used to hold up every client."""
    entry = {"token": "a", "logprob": -1.5, "bytes": [97], "top_logprobs": [{"token": "b"}] * 20}
    reply = {"choices": [{"logprobs": {"content": [entry] * 20_000}}]}
    writer = threading.Thread(target=json_bytes_by_pieces, args=(reply,))
    turns = 0
    writer.start()
    while writer.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 5
