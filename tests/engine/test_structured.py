"""Replies of the demo pair under many schemas: what ends by itself is what was asked for."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import pytest

from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.engine.structure import structure_grammar
from mlx_worker.records import Sampling, Structure
from tests.demo_prompts import HELD_OUT, prompt_of
from tests.schemas import SCHEMAS
from tests.tiny import write
from tests.walks import problem

MAX_TOKENS = 80
BLANKS = re.compile(r"[ \n\t\r]{42,}")  # more than the grammar lets stand in one place


@pytest.fixture(scope="module")
def demo() -> LoadedPair:
    return load_pair("demo")


@cache
def prompts() -> list[str]:
    """Of all kinds: what is asked for in words is seldom what the schema asks for."""
    turns = zip(*(HELD_OUT[skill] for skill in ("json", "chat", "story", "count")), strict=False)
    return [entry["messages"][-1]["content"] for turn in turns for entry in turn]


def runs() -> Iterator[tuple[str, Any, int]]:
    """Every schema in turn, again and again, with a number."""
    number = 0
    while True:
        for name, schema in SCHEMAS:
            yield name, schema, number
            number += 1


def outcome(demo: LoadedPair, schema: Any, number: int) -> str:
    """stop or length, of one reply that is checked: at T = 0 or 1, with a draft or without."""
    grammar, _ = structure_grammar(Structure(json.dumps(schema)), None)
    text = prompts()[number * 7 % len(prompts())]
    is_hot, is_drafted = number // len(SCHEMAS) % 2, number % 3 > 0
    reply = write(
        demo,
        prompt_of(demo, text),
        MAX_TOKENS,
        grammar=grammar,
        sampling=Sampling(temperature=float(is_hot), seed=number),
        speculation="on" if is_drafted else "off",
        depth=1 + number % 5,
    )
    done = reply.done
    assert not BLANKS.search(reply.text)
    if done.notice is None:  # also where max_tokens fell on its very end
        assert problem(schema, json.loads(reply.text)) is None
    else:
        assert done.finish_reason == "length"
        assert done.notice[0] == "truncated_during_structured_output"
    return done.finish_reason


def outcomes(demo: LoadedPair, n_runs: int, first: int = 0) -> Counter[str]:
    return Counter(
        outcome(demo, schema, number) for _, schema, number in islice(runs(), first, first + n_runs)
    )


def test_twenty_replies_satisfy_their_schemas(demo: LoadedPair):
    """Those that max_tokens cut are counted apart, and are the fewer."""
    found = outcomes(demo, 10) + outcomes(demo, 10, first=len(SCHEMAS) + 10)
    assert found.total() == 20
    assert found["stop"] > 8


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_two_thousand_replies_satisfy_their_schemas(demo: LoadedPair):
    """Over fifty schemas, greedy and at T = 1."""
    assert len(SCHEMAS) >= 50
    found = outcomes(demo, 2000)
    print(dict(found))
    assert found.total() == 2000
    assert found["stop"] > 1200
