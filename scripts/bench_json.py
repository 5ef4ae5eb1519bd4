"""Compare replies held to a JSON schema with and without a draft, and with no schema at all.

    python scripts/bench_json.py [--model demo] [--depth 4] [--repeats 5] [--json FILE]

Every prompt is answered in each arm, one after the other, the order turned at every repeat: plainly
and with drafts under the schema, which must be the same reply; and both without it. A ratio is
plain's time over the draft's, first id to last: above 1 the draft is faster. `accepted` is of what
the draft itself proposed; ids that the schema left no choice about are counted beside it.
Prints a table, then one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median

from results import tell

from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.engine.session import generate_events
from mlx_worker.engine.structure import structure_grammar
from mlx_worker.models.locate import locate
from mlx_worker.records import Done, GenerationRequest, Speculation, Structure, Text, Timing

NAMES = {"type": "array", "items": {"type": "string"}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
        "job": {"type": "string"},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
ITEM = {
    "type": "object",
    "properties": {"item": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["item", "count"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {"customer": {"type": "string"}, "items": {"type": "array", "items": ITEM}},
    "required": ["customer", "items"],
    "additionalProperties": False,
}
BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "author": {"type": "string"},
        "year": {"type": "integer"},
        "tags": NAMES,
    },
    "required": ["title", "author", "year", "tags"],
    "additionalProperties": False,
}
PROMPTS = (
    ("Write JSON for a person named Ada, age 36, city Paris.", PERSON),
    ("Write JSON for an order by Omar: 12 apples, 7 figs and 30 cherries.", ORDER),
    ("Write JSON for an order by Rosa: 5 plums, 21 melons, 9 dates and 16 pears.", ORDER),
    ("Write a JSON list of red, blue, green, yellow, purple and gold.", NAMES),
    ('Write JSON for the book "The Quiet River" by Nina, year 1987, tags history and art.', BOOK),
)


@dataclass(frozen=True)
class Reply:
    """One reply: what was written, and what that took."""

    ids: tuple[int, ...]
    timing: Timing


@dataclass(frozen=True)
class Line:
    """One prompt: medians of interleaved pairs."""

    prompt: str
    tokens: int
    with_schema: float
    without: float
    cost_of_schema: float
    drafted: int
    accepted: int
    tokens_per_round: float | None
    same_ids: bool


def reply(pair: LoadedPair, request: GenerationRequest) -> Reply:
    ids: list[int] = []
    for event in generate_events(pair, request):
        if isinstance(event, Text):
            ids.extend(event.ids)
        elif isinstance(event, Done):
            timing = event.timing
    return Reply(tuple(ids), timing)


def compare(pair: LoadedPair, text: str, schema: object, depth: int, repeats: int) -> Line:
    """One prompt in all four arms, `repeats` times."""
    prompt = pair.encode_chat([{"role": "user", "content": text}])
    grammar, _ = structure_grammar(Structure(json.dumps(schema)), None)
    ways: list[tuple[Speculation, bool]] = [
        ("off", True),
        ("on", True),
        ("off", False),
        ("on", False),
    ]
    replies: dict[tuple[Speculation, bool], list[Reply]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way in ways if repeat % 2 else reversed(ways):
            speculation, is_held = way
            held = grammar if is_held else None
            request = GenerationRequest(
                prompt, 200, speculation=speculation, depth=depth, grammar=held
            )
            found = reply(pair, request)
            if repeat:  # the first turn warms all up
                replies[way].append(found)
    held, free = replies["on", True], replies["on", False]
    last = held[-1]
    return Line(
        prompt=text,
        tokens=len(last.ids),
        with_schema=speedup(replies["off", True], held),
        without=speedup(replies["off", False], free),
        cost_of_schema=per_id(held) / per_id(free),
        drafted=last.timing.drafted,
        accepted=last.timing.accepted,
        tokens_per_round=last.timing.tokens_per_round,
        same_ids=len({one.ids for one in (*replies["off", True], *held)}) == 1,
    )


def speedup(plain: Sequence[Reply], drafted: Sequence[Reply]) -> float:
    pairs = zip(plain, drafted, strict=True)
    return median(a.timing.decode_ms / b.timing.decode_ms for a, b in pairs)


def per_id(replies: Sequence[Reply]) -> float:
    return median(one.timing.decode_ms / (len(one.ids) - 1) for one in replies)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pair = load_pair(locate(options.model))
    print("tokens  schema  without  cost  accepted  of drafted  ids/round  same  prompt")
    lines = []
    for text, schema in PROMPTS:
        line = compare(pair, text, schema, options.depth, options.repeats)
        lines.append(line)
        print(
            f"{line.tokens:6} {line.with_schema:7.2f} {line.without:8.2f} "
            f"{line.cost_of_schema:5.2f} {line.accepted:9} {line.drafted:11} "
            f"{line.tokens_per_round:10.2f}  {'yes' if line.same_ids else 'NO':4}  {text}",
            flush=True,
        )
    overall = geometric_mean(line.with_schema for line in lines)
    result = {"draft_over_plain": overall, "lines": [asdict(line) for line in lines]}
    print(f"under a schema the draft is {overall:.2f} times as fast as plain decoding")
    tell(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
