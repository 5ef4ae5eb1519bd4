"""Compare plain decoding with mlx-lm's own loop, interleaved in one run.

    python scripts/bench_peers.py [--model demo] [--repeats 5] [--max-tokens 128] [--json FILE]

Every verdict rests on plain decoding, so plain decoding must be as fast as the reference: a slow
baseline would make any draft look good. Both write the same greedy reply from the same ids with
the same weights; the time between the EDGE-th id and the EDGE-th last is compared, request by
request, the order turned at every repeat. (At the edges the two loops differ in how much they have
already computed when an id is handed over, so the first and the last few ids are left out.)
Prints a table, then one JSON object.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter

import mlx.core as mx
from mlx_lm import stream_generate
from results import tell

from mlx_worker.bench.workloads import BUILT_IN, names, pick
from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.engine.session import generate_events
from mlx_worker.models.locate import locate
from mlx_worker.records import GenerationRequest, Text

EDGE = 4


@dataclass(frozen=True)
class Line:
    """One workload: tokens per second of both, and ours over theirs, medians over the repeats."""

    workload: str
    tokens: int
    ours_per_s: float
    mlx_lm_per_s: float
    ratio: float
    same_ids: bool


def seconds_per_id(times: Sequence[float]) -> float:
    """Mean time of an id away from both ends, from the moments at which ids were handed over."""
    return (times[-EDGE - 1] - times[EDGE]) / (len(times) - 1 - 2 * EDGE)


def ours(pair: LoadedPair, ids: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
    """Ids and seconds per id of this program's plain path."""
    request = GenerationRequest(tuple(ids), max_tokens, ignore_eos=True, speculation="off")
    written: list[int] = []
    times: list[float] = []
    for event in generate_events(pair, request):
        if isinstance(event, Text):
            times.append(perf_counter())
            written.extend(event.ids)
    return written, seconds_per_id(times)


def theirs(pair: LoadedPair, ids: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
    """Ids and seconds per id of mlx-lm's stream_generate."""
    tokenizer = pair.tokenizer
    eos, tokenizer._eos_token_ids = tokenizer._eos_token_ids, set()
    written: list[int] = []
    times: list[float] = []
    try:
        for reply in stream_generate(
            pair.target.model, tokenizer, list(ids), max_tokens=max_tokens
        ):
            times.append(perf_counter())
            written.append(reply.token)
        return written, seconds_per_id(times)
    finally:
        tokenizer._eos_token_ids = eos


def compare(pair: LoadedPair, workload: str, repeats: int, max_tokens: int) -> Line:
    """One prompt, `repeats` times each way."""
    ids = pair.encode_chat(pick(BUILT_IN, [workload], 1)[0].messages)
    arms = {"ours": ours, "theirs": theirs}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    replies: dict[str, list[int]] = {}
    for repeat in range(repeats + 1):
        order = list(arms) if repeat % 2 else list(reversed(arms))
        for name in order:
            replies[name], spent = arms[name](pair, ids, max_tokens)
            if repeat:  # the first turn warms both up
                seconds[name].append(spent)
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
    return Line(
        workload,
        len(replies["ours"]),
        1 / median(seconds["ours"]),
        1 / median(seconds["theirs"]),
        median(ratios),
        replies["ours"] == replies["theirs"],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pair = load_pair(locate(options.model), "none")
    print(f"{'workload':10} {'tokens':>6} {'ours/s':>8} {'mlx-lm/s':>9} {'ratio':>6}  same ids")
    lines = []
    for workload in names(BUILT_IN):
        line = compare(pair, workload, options.repeats, options.max_tokens)
        lines.append(line)
        print(
            f"{line.workload:10} {line.tokens:6} {line.ours_per_s:8.1f} {line.mlx_lm_per_s:9.1f} "
            f"{line.ratio:6.3f}  {'yes' if line.same_ids else 'NO'}"
        )
        mx.clear_cache()
    overall = geometric_mean(line.ratio for line in lines)
    result = {"plain_over_mlx_lm": overall, "lines": [asdict(line) for line in lines]}
    print(f"plain decoding is {overall:.3f} times as fast as mlx-lm's")
    tell(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
