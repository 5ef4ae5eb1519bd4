"""Compare a reply through the local API with the same one from the engine in this process.

    python scripts/bench_api.py [--model demo] [--repeats 5] [--max-tokens 128] [--json FILE]

The API must cost next to nothing of what the engine reaches. Both write the same replies, greedy
and without drafts, with the same prefix cache, one after the other, the order turned at every
repeat.
`streamed` compares the time from the first piece of text to the last, `whole` the time of the whole
request, both as the client's clock has it; 1.00 is as fast as the engine alone. The client runs in
this process, so its own work counts against the API.

Then the time to the first piece of a follow-up turn on a long conversation: right after the turn
before it, over that of one which nobody asked before.
Prints a table, then one JSON object.
"""

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from results import tell

from mlx_worker.bench.workloads import BUILT_IN, names, pick
from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.engine.prefix import PrefixCache
from mlx_worker.loaded_model import Decider, LoadedModel
from mlx_worker.models.locate import locate
from mlx_worker.records import Done, GenerationRequest, Text

STORY = "The lamp stood by the window and gave a warm light to the room. "
CONVERSATION_TOKENS = 2000
CHAT = "/v1/chat/completions"

Messages = Sequence[Any]


@dataclass(frozen=True)
class Took:
    """One reply: its text's first and last piece, and its end, in seconds from the question."""

    first_s: float
    last_s: float
    end_s: float
    text: str


@dataclass(frozen=True)
class Line:
    """The engine's time over the API's: the median of all pairs, and their quartiles."""

    kind: str
    workload: str
    ratio: float
    low: float
    high: float
    same_text: bool


class Api:
    """A worker of its own, asked over one connection."""

    def __init__(self, model: str, address: str) -> None:
        self._model = model
        self._connection = http.client.HTTPConnection(address)

    def ask(self, messages: Messages, max_tokens: int, is_stream: bool) -> Took:
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "speculation": "off",
            "stream": is_stream,
        }
        began = perf_counter()
        self._connection.request(
            "POST", CHAT, json.dumps(body), {"Content-Type": "application/json"}
        )
        reply = self._connection.getresponse()
        if reply.status != 200:
            raise SystemExit(reply.read().decode())
        return read_stream(reply, began) if is_stream else read_whole(reply, began)


def read_stream(reply: http.client.HTTPResponse, began: float) -> Took:
    times, pieces = [], []
    while line := reply.readline():
        if line.startswith(b"data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"].get("content")
            if delta:
                times.append(perf_counter() - began)
                pieces.append(delta)
    return Took(times[0], times[-1], perf_counter() - began, "".join(pieces))


def read_whole(reply: http.client.HTTPResponse, began: float) -> Took:
    content = json.loads(reply.read())["choices"][0]["message"]["content"]
    took_s = perf_counter() - began
    return Took(took_s, took_s, took_s, content)


def ask_engine(model: LoadedModel, messages: Messages, max_tokens: int) -> Took:
    """As a worker's engine thread answers, with the time of encoding the prompt."""
    times, pieces = [], []
    began = perf_counter()
    ids = model.pair.encode_chat(messages)
    request = GenerationRequest(ids, max_tokens, speculation="off")
    for event in model.events(request):
        if isinstance(event, Text) and event.text:
            times.append(perf_counter() - began)
            pieces.append(event.text)
        elif isinstance(event, Done):
            times.append(perf_counter() - began)
    return Took(times[0], times[-2], times[-1], "".join(pieces))


def compare(
    model: LoadedModel, api: Api, workload: str, repeats: int, max_tokens: int
) -> Iterator[Line]:
    """One prompt, `repeats` times each way, streamed and whole."""
    messages = pick(BUILT_IN, [workload], 1)[0].messages
    spans: dict[str, Callable[[Took], float]] = {
        "streamed": lambda took: took.last_s - took.first_s,
        "whole": lambda took: took.end_s,
    }
    ratios: dict[str, list[float]] = {kind: [] for kind in spans}
    texts: dict[str, set[str]] = {kind: set() for kind in spans}
    for repeat in range(repeats + 1):
        for kind, span in spans.items():
            arms = [
                lambda: ask_engine(model, messages, max_tokens),
                lambda kind=kind: api.ask(messages, max_tokens, kind == "streamed"),
            ]
            found = {i: arms[i]() for i in ((0, 1) if repeat % 2 else (1, 0))}
            texts[kind] |= {took.text for took in found.values()}
            if repeat:  # the first turn warms both up
                ratios[kind].append(span(found[0]) / span(found[1]))
    for kind in spans:
        yield line_of(kind, workload, ratios[kind], len(texts[kind]) == 1)


def line_of(kind: str, workload: str, ratios: Sequence[float], same_text: bool) -> Line:
    ordered = sorted(ratios)
    low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    return Line(kind, workload, median(ordered), low, high, same_text)


def conversation(pair: LoadedPair, n: int) -> Messages:
    """Two turns of some CONVERSATION_TOKENS ids that begin like no other, and a follow-up."""
    per_story = len(pair.encode_text(STORY)) - 1
    text = f"Story {n}. {STORY * (CONVERSATION_TOKENS // per_story)}"
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "It is warm."},
        {"role": "user", "content": "And then?"},
    ]


def follow_up(pair: LoadedPair, api: Api, repeats: int) -> tuple[float, float]:
    """Seconds to the first piece, medians: right after the turn before, and out of the blue."""
    warm, cold = [], []
    for repeat in range(repeats):
        known, unknown = conversation(pair, 2 * repeat), conversation(pair, 2 * repeat + 1)
        api.ask(known[:1], 4, is_stream=True)
        warm.append(api.ask(known, 4, is_stream=True).first_s)
        cold.append(api.ask(unknown, 4, is_stream=True).first_s)
    return median(warm), median(cold)


@contextmanager
def serving(model: str) -> Iterator[str]:
    """A worker process on a free port, with a folder of its own; its address."""
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlx_worker", "serve", "--port", "0", "--model", model],
            env={**os.environ, "MLX_WORKER_HOME": home},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            found = re.fullmatch(r"console: http://(.+)/\n", process.stdout.readline())
            if not found:
                raise SystemExit("the worker did not start")
            yield found[1]
        finally:
            process.terminate()
            process.communicate()


def show(line: Line) -> None:
    print(
        f"{line.kind:9} {line.workload:10} {line.ratio:6.3f} {line.low:6.3f} {line.high:6.3f}"
        f"  {'yes' if line.same_text else 'NO'}",
        flush=True,
    )


def overall(lines: Sequence[Line], kind: str) -> float:
    return median(line.ratio for line in lines if line.kind == kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pair = load_pair(locate(options.model), "none")
    model = LoadedModel(pair, PrefixCache(), Decider())
    with serving(options.model) as address:
        api = Api(Path(options.model).name, address)
        print(f"{'':9} {'workload':10} {'ratio':>6} {'from':>6} {'to':>6}  same text")
        lines = []
        for workload in names(BUILT_IN):
            for line in compare(model, api, workload, options.repeats, options.max_tokens):
                lines.append(line)
                show(line)
        warm_s, cold_s = follow_up(pair, api, options.repeats)
    result = {
        "streamed": overall(lines, "streamed"),
        "whole": overall(lines, "whole"),
        "follow_up_ms": {"warm": 1000 * warm_s, "cold": 1000 * cold_s, "ratio": warm_s / cold_s},
        "lines": [asdict(line) for line in lines],
    }
    print(f"through the API: {result['streamed']:.3f} streamed, {result['whole']:.3f} whole")
    print(f"follow-up: {1000 * warm_s:.0f} ms warm, {1000 * cold_s:.0f} ms cold")
    tell(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
