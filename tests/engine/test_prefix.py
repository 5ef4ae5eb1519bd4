"""A reply that goes on from what was kept is the reply of a cold start, whatever came before."""

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import mlx.core as mx
import pytest

from mlx_worker.engine.cache import SLACK_TOKENS
from mlx_worker.engine.prefix import LEAST_SHARED_TOKENS, MAX_MARKS, PrefixCache
from mlx_worker.engine.session import Session
from mlx_worker.errors import GenerationFailed
from mlx_worker.records import GenerationRequest, Sampling, Text
from tests.tiers import thinned
from tests.tiny import VOCAB, Script, Written, tiny_pair, write

SHAPES = ["shared", "own", "llama"]
DRAFTS = [None, "lookup", "assistant", "same_weights", "other_seed"]
LONG = pytest.mark.long
FEW = [("shared", "assistant"), ("own", None), ("own", "other_seed"), ("llama", "lookup")]
PAIRS = [
    pytest.param(shape, draft, marks=[] if (shape, draft) in FEW else LONG)
    for shape in SHAPES
    for draft in DRAFTS
    if (shape, draft) != ("llama", "assistant")
]
SAMPLINGS = {
    "greedy": Sampling(logprobs=0),
    "sampled": Sampling(temperature=0.9, seed=3, logprobs=0),
}
SYSTEM = [2, *range(30, 75)]  # several windows


def some(n: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(10, VOCAB) for _ in range(n)]


def asked(
    prompt: Sequence[int], max_tokens: int = 24, sampling: str = "greedy", **options: Any
) -> GenerationRequest:
    given: dict[str, Any] = {"ignore_eos": True, "sampling": SAMPLINGS[sampling], **options}
    return GenerationRequest(tuple(prompt), max_tokens, **given)


def reply(
    prefixes: PrefixCache | None,
    request: GenerationRequest,
    shape: str = "own",
    draft: str | None = None,
    *,
    scope: str = "local",
) -> Written:
    """The whole reply, in short prefill chunks."""
    pacer = Script([(0, 3), (4, 9)]) if draft else None
    pair = tiny_pair(shape, draft)
    return Written(Session(pair, request, pacer, prefixes=prefixes, scope=scope, chunk_tokens=16))


@cache
def cold(request_key: tuple[tuple[int, ...], int, str], shape: str) -> Written:
    prompt, n, sampling = request_key
    return reply(None, asked(prompt, n, sampling=sampling), shape)


def same(found: Written, prompt: Sequence[int], sampling: str, shape: str) -> int:
    """Assert that it is what a cold start writes; return how many tokens it was spared."""
    yardstick = cold((tuple(prompt), found.done.usage.completion_tokens, sampling), shape)
    assert (found.ids, found.text) == (yardstick.ids, yardstick.text)
    chosen, others = ([entry.logprob for entry in one.logprobs] for one in (found, yardstick))
    assert chosen == pytest.approx(others, abs=1e-4)
    return found.done.usage.cached_tokens


# --- the next turn ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "draft", "sampling"),
    [
        pytest.param(
            *pair.values,
            sampling,
            marks=[] if pair.values in FEW[i::2] else LONG,
        )
        for pair in PAIRS
        for i, sampling in enumerate(SAMPLINGS)
    ],
)
def test_a_next_turn_prefills_only_what_is_new(shape: str, draft: str | None, sampling: str):
    """Prompt, reply and a new question: all but the reply's last id was cached. Three turns."""
    prefixes, prompt, n_known = PrefixCache(), list(SYSTEM), 0
    for turn in range(3):
        request = asked(prompt, sampling=sampling)
        found = reply(prefixes, request, shape, draft)
        assert same(found, prompt, sampling, shape) == n_known
        n_known = len(prompt) + len(found.ids) - 1
        prompt = [*prompt, *found.ids, *some(7, turn)]


@pytest.mark.parametrize(
    ("shape", "draft", "n_off"),
    [
        pytest.param(*pair.values, n_off, marks=[] if pair.values in few else LONG)
        for pair in PAIRS
        for n_off, few in ((0, FEW[::2]), (3, ()), (SLACK_TOKENS, FEW[1::2]))
    ],
)
def test_a_turn_that_writes_the_last_reply_again_goes_on_from_the_prompt(
    shape: str, draft: str | None, n_off: int
):
    """As templates do that leave thinking out; they may end the prompt in other ids, too."""
    prefixes = PrefixCache()
    reply(prefixes, asked(SYSTEM, 40), shape, draft)
    n_shared = len(SYSTEM) - n_off
    prompt = [*SYSTEM[:n_shared], *some(40, 5)]
    found = reply(prefixes, asked(prompt, sampling="greedy"), shape, draft)
    assert same(found, prompt, "greedy", shape) == n_shared


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_prompt_again_prefills_its_last_id_alone(shape: str):
    """Its pass chooses the first new one."""
    prefixes = PrefixCache()
    for n_cached in (0, len(SYSTEM) - 1, len(SYSTEM) - 1):
        found = reply(prefixes, asked(SYSTEM, 20), shape)
        assert same(found, SYSTEM, "greedy", shape) == n_cached


@pytest.mark.parametrize("shape", thinned(SHAPES))
def test_earlier_turns_can_be_gone_back_to(shape: str):
    """A client that edits an earlier question: the last MAX_MARKS prompts are remembered."""
    prefixes, prompts, prompt = PrefixCache(), list[list[int]](), list(SYSTEM)
    for turn in range(MAX_MARKS):
        prompts.append(prompt)
        found = reply(prefixes, asked(prompt, 20), shape)
        prompt = [*prompt, *found.ids, *some(7, turn)]
    for n, earlier in enumerate(prompts):
        edited = [*earlier, *some(9, 70 + n)]
        found = reply(prefixes, asked(edited, 12), shape)
        assert same(found, edited, "greedy", shape) >= len(earlier)


# --- after every ending -----------------------------------------------------------------------


ENDINGS = ["length", "eos", "stop", "cancelled", "cancelled at once", "cancelled in prefill"]


@pytest.mark.parametrize(
    ("shape", "draft", "ending"),
    [
        pytest.param(*pair.values, ending, marks=[] if pair.values == FEW[i % 4] else LONG)
        for pair in PAIRS
        for i, ending in enumerate(ENDINGS)
    ],
)
def test_a_turn_after_any_ending_is_right(shape: str, draft: str | None, ending: str):
    """Whatever is in the caches beyond the reply is taken back; the cut falls inside a round."""
    plain = cold((tuple(SYSTEM), 40, "greedy"), shape)
    prefixes = PrefixCache()
    request = asked(SYSTEM, 17 if ending == "length" else 40, speculation="auto")
    if ending == "stop":
        request = asked(SYSTEM, 40, stop=(plain.text[11:14],), speculation="auto")
    pair = tiny_pair(shape, draft)
    if ending == "eos":
        pair = tiny_pair(shape, draft, eos_ids=frozenset({plain.ids[13]}))
        request = asked(SYSTEM, 40, ignore_eos=False)
    pacer = Script([(0, 3), (4, 9)]) if draft else None
    events = Session(pair, request, pacer, prefixes=prefixes, chunk_tokens=8).events()
    wanted = {"cancelled": 11, "cancelled at once": 7, "cancelled in prefill": 2}
    taken = list(islice(events, wanted.get(ending)))
    events.close()
    ids = [id for event in taken if isinstance(event, Text) for id in event.ids]
    assert ids == plain.ids[: len(ids)]
    prompt = [*SYSTEM, *ids, *some(6)]
    found = reply(prefixes, asked(prompt), shape, draft)
    n_known = 16 if ending == "cancelled in prefill" else len(SYSTEM) + max(0, len(ids) - 1)
    assert same(found, prompt, "greedy", shape) == n_known


def test_a_reply_that_broke_leaves_nothing_behind():
    """Its caches may hold what broke it."""
    prefixes = PrefixCache()
    broken = replace(asked(SYSTEM, 8), sampling=Sampling(suppress_ids=tuple(range(VOCAB))))
    with pytest.raises(GenerationFailed):
        reply(prefixes, broken)
    assert len(prefixes) == 0
    found = reply(prefixes, asked(SYSTEM))
    assert same(found, SYSTEM, "greedy", "own") == 0


# --- whose it is ------------------------------------------------------------------------------


def test_another_scope_is_never_looked_at():
    """One key's conversation is nothing to another's, however alike their prompts are."""
    prefixes = PrefixCache()
    for scope, n_cached in (("a", 0), ("b", 0), ("a", len(SYSTEM) - 1), ("b", len(SYSTEM) - 1)):
        found = reply(prefixes, asked(SYSTEM), scope=scope)
        assert same(found, SYSTEM, "greedy", "own") == n_cached


@pytest.mark.parametrize(
    ("seed", "n_turns"),
    [(0, 6), *(pytest.param(n, 14, marks=LONG) for n in range(9))],
)
@pytest.mark.parametrize(
    ("shape", "draft"), [("own", None), ("shared", "assistant"), ("own", "other_seed")]
)
def test_conversations_in_any_order_never_mix(
    shape: str, draft: str | None, seed: int, n_turns: int
):
    """Turns, second thoughts and other conversations with the same beginning, at random."""
    chance, prefixes = random.Random(seed), PrefixCache()
    known: list[list[int]] = [list(SYSTEM), [*SYSTEM[:20], *some(9)]]
    spared = 0
    for n in range(n_turns):
        base = chance.choice(known)
        cut = chance.choice([len(base), len(base), chance.randint(LEAST_SHARED_TOKENS, len(base))])
        prompt = [*base[:cut], *some(chance.randint(1, 20), 100 * seed + n)]
        sampling = chance.choice(list(SAMPLINGS))
        request = asked(prompt, chance.randint(1, 30), sampling=sampling)
        found = reply(prefixes, request, shape, draft)
        spared += same(found, prompt, sampling, shape) > 0
        known.append([*prompt, *found.ids])
    assert spared >= n_turns // 2


# --- what it holds ----------------------------------------------------------------------------


def test_what_is_over_the_budget_goes_the_least_recently_used_first():
    """And nothing is kept beyond it."""
    one = PrefixCache()
    reply(one, asked(SYSTEM))
    prefixes = PrefixCache(int(2.5 * one.nbytes))
    prompts = [[2, *some(30, seed)] for seed in range(3)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        reply(prefixes, asked(prompt))
    assert prefixes.nbytes <= prefixes.budget_bytes
    cached = [reply(prefixes, asked(p)).done.usage.cached_tokens > 0 for p in prompts[::2]]
    assert cached == [True, True]
    assert reply(prefixes, asked(prompts[1])).done.usage.cached_tokens == 0


def test_one_that_is_over_the_budget_alone_drives_nobody_out():
    """A single long prompt used to empty the cache for everyone, and wasn't kept either."""
    one = PrefixCache()
    reply(one, asked(SYSTEM))
    prefixes = PrefixCache(3 * one.nbytes)
    reply(prefixes, asked(SYSTEM), scope="a")
    reply(prefixes, asked([2, *some(3000)]), scope="b")
    assert len(prefixes) == 1
    assert reply(prefixes, asked(SYSTEM), scope="a").done.usage.cached_tokens > 0


@pytest.mark.parametrize("draft", [None, "other_seed"])
def test_what_is_held_is_what_is_counted(draft: str | None):
    """Masks that a conversation had for its chunks are let go with it."""
    pair, prefixes, prompt = tiny_pair("own", draft), PrefixCache(), [2, *some(700)]
    write(pair, prompt, 4, ignore_eos=True)
    gc.collect()
    before = mx.get_active_memory()
    for turn in range(6):
        prompt = [*prompt, *some(100 + turn, turn)]
        Written(Session(pair, asked(prompt, 4), prefixes=prefixes))
    gc.collect()
    assert mx.get_active_memory() - before <= prefixes.nbytes


def test_no_budget_keeps_nothing():
    """The setting that turns it off."""
    prefixes = PrefixCache(0)
    for _ in range(2):
        found = reply(prefixes, asked(SYSTEM))
        assert found.done.usage.cached_tokens == 0
        assert (len(prefixes), prefixes.nbytes) == (0, 0)


def test_a_conversation_that_goes_on_is_held_once():
    """Turn after turn the same caches grow; they are not copied."""
    prefixes, prompt = PrefixCache(), list(SYSTEM)
    for turn in range(4):
        prompt = [*prompt, *reply(prefixes, asked(prompt)).ids, *some(5, turn)]
        assert len(prefixes) == 1


@pytest.mark.parametrize("draft", [None, "other_seed"])
def test_hits_are_counted(draft: str | None):
    """Requests, those that went on from something, and the ids that they were spared."""
    prefixes = PrefixCache()
    for _ in range(3):
        reply(prefixes, asked(SYSTEM), "own", draft)
    counted = (prefixes.n_requests, prefixes.n_hits, prefixes.n_tokens)
    assert counted == (3, 2, 2 * (len(SYSTEM) - 1))


@pytest.mark.parametrize("n_shared", [1, LEAST_SHARED_TOKENS - 1, LEAST_SHARED_TOKENS])
def test_a_few_shared_ids_are_no_hit(n_shared: int):
    """Every conversation begins with the same few."""
    prefixes = PrefixCache()
    reply(prefixes, asked(SYSTEM))
    found = reply(prefixes, asked([*SYSTEM[:n_shared], *some(20, 9)]))
    assert found.done.usage.cached_tokens == (n_shared if n_shared >= LEAST_SHARED_TOKENS else 0)
