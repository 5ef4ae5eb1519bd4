"""The Python door: what a script can ask of a pair, and what it gets."""

import gc
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_worker
from mlx_worker.engine.checkpoint import DEMO_FOLDER
from mlx_worker.errors import (
    ContextTooLong,
    EngineDied,
    InvalidParameter,
    ModelNotFound,
    RequestError,
)
from mlx_worker.pair import Pair, load
from mlx_worker.records import Done, Text

IDS = [2, 300, 301, 302, 303, 300, 301]  # any ids of the demo's 2,048, with a repeat for lookup
MESSAGES = [{"role": "user", "content": "Count from 3 in steps of 4."}]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with load("demo") as pair:
        yield pair


class Reply:
    """All that one generate gave."""

    def __init__(self, pair: Pair, prompt: Any = IDS, **options: Any) -> None:
        options = {"max_tokens": 12, "temperature": 0, **options}
        *texts, done = pair.generate(prompt, **options)
        assert isinstance(done, Done)
        self.done: Done = done
        self.texts = [event for event in texts if isinstance(event, Text)]
        assert len(self.texts) == len(texts)
        self.ids = [id for event in self.texts for id in event.ids]
        self.text = "".join(event.text for event in self.texts)
        self.logprobs = [entry for event in self.texts for entry in event.logprobs or ()]


# --- loading ----------------------------------------------------------------------------------


def test_the_door_opens_from_the_package():
    """`from mlx_worker import load`, reached only when it is used."""
    assert mlx_worker.load is load


def test_paths_are_taken_as_well_as_texts():
    """For the model and for the draft."""
    with load(DEMO_FOLDER / "target", DEMO_FOLDER / "assistant") as pair:  # type: ignore[arg-type]
        assert pair.status()["draft_kind"] == "assistant"


@pytest.mark.parametrize(
    ("draft", "kind"), [("auto", "assistant"), ("lookup", "lookup"), ("none", None), (None, None)]
)
def test_the_draft_is_chosen_by_word(draft: str | None, kind: str | None):
    """The demo's own is found automatically."""
    with load("demo", draft) as pair:
        assert pair.status()["draft_kind"] == kind


def test_a_failed_load_raises_here_and_leaves_no_thread(tmp_path: Path):
    """The error is the engine's own."""
    import threading

    before = threading.active_count()
    with pytest.raises(ModelNotFound):
        load(str(tmp_path / "nowhere"))
    assert threading.active_count() == before


def test_two_pairs_live_side_by_side(pair: Pair):
    """Each on its own thread; one reply inside another."""
    with load("demo", "lookup") as other:
        outer = pair.generate(IDS, max_tokens=6, temperature=0)
        first = next(outer)
        inner = Reply(other, max_tokens=6)
        rest = list(outer)
    texts = [event for event in (first, *rest) if isinstance(event, Text)]
    assert [id for event in texts for id in event.ids] == inner.ids


# --- single questions -------------------------------------------------------------------------


def test_logits_are_one_row_an_id(pair: Pair):
    """Plain float32 numpy."""
    rows = pair.logits(IDS)
    assert (rows.shape, rows.dtype) == ((len(IDS), 2048), np.float32)
    assert np.isfinite(rows).all()
    assert np.allclose(pair.logits(IDS[:3]), rows[:3], atol=1e-4)


def test_a_draft_proposes_up_to_the_depth(pair: Pair):
    """Plain ints; longer chains begin as shorter ones."""
    chain = pair.propose(IDS, 8)
    assert len(chain) == 8
    assert all(type(id) is int and 0 <= id < 2048 for id in chain)
    assert pair.propose(IDS, 3) == chain[:3]
    assert pair.propose(IDS, 0) == []


def prompts(n: int) -> list[list[int]]:
    """Random ids, so that neither replies nor proposals are all alike."""
    chance = random.Random(1)
    return [[2, *(chance.randrange(200, 2000) for _ in range(6))] for _ in range(n)]


def test_a_proposal_follows_the_targets_own_next_id():
    """A draft with the target's weights says what the target would write after that id."""
    with load("demo", "demo") as pair:
        replies = [Reply(pair, prompt, max_tokens=4, ignore_eos=True).ids for prompt in prompts(3)]
        assert [pair.propose(prompt, 3) for prompt in prompts(3)] == [ids[1:] for ids in replies]
    assert any(ids[:3] != ids[1:] for ids in replies)


def test_the_position_of_a_proposal_can_be_chosen(pair: Pair):
    """As the pair was loaded, unless said otherwise."""
    cached = [pair.propose(prompt, 4, position="last_cached") for prompt in prompts(6)]
    newest = [pair.propose(prompt, 4, position="newest") for prompt in prompts(6)]
    assert cached == [pair.propose(prompt, 4) for prompt in prompts(6)]
    assert cached != newest
    with load("demo", position="newest") as other:
        assert newest == [other.propose(prompt, 4) for prompt in prompts(6)]


def test_without_a_draft_nothing_can_be_proposed():
    """Said as the client's mistake."""
    with load("demo", None) as pair, pytest.raises(RequestError, match="demo has no draft"):
        pair.propose(IDS, 2)


@pytest.mark.parametrize(
    ("ids", "depth", "position", "part"),
    [
        ([], 1, None, "prompt: [], must be at least one id long"),
        ([5000], 1, None, "prompt: 5000, must be token ids, 0 to 2047"),
        (["5"], 1, None, "prompt: '5', must be token ids"),
        ([1.5], 1, None, "prompt: 1.5, must be token ids"),
        ([5], 9, None, "depth: 9, must be 0 to 8"),
        ([5], -1, None, "depth: -1, must be 0 to 8"),
        ([5], 1, "middle", "position: 'middle', must be one of last_cached, newest"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(
    pair: Pair, ids: Any, depth: int, position: Any, part: str
):
    """The value and its limit are in the message."""
    with pytest.raises(RequestError) as raised:
        pair.propose(ids, depth, position)
    assert part in str(raised.value)


# --- generate ---------------------------------------------------------------------------------


def test_a_reply_is_texts_and_one_done(pair: Pair):
    """Ids, their text, and at the end why, how many and how fast."""
    reply = Reply(pair)
    assert len(reply.ids) == reply.done.usage.completion_tokens <= 12
    assert reply.done.usage.prompt_tokens == len(IDS)
    assert reply.done.finish_reason in ("stop", "length")
    assert reply.done.timing.completion_tokens == len(reply.ids)
    assert not hasattr(reply.done, "text")


def test_temperature_zero_takes_the_likeliest_id(pair: Pair):
    """Whatever the model's generation_config says."""
    reply = Reply(pair, max_tokens=3, ignore_eos=True)
    rows = pair.logits([*IDS, *reply.ids])
    likeliest = rows[len(IDS) - 1 : -1].argmax(axis=-1)
    assert reply.ids == likeliest.tolist()


def test_ids_skip_the_chat_template(pair: Pair):
    """Exactly they are the prompt; numpy's are as good."""
    assert Reply(pair, IDS, max_tokens=1).done.usage.prompt_tokens == len(IDS)
    assert Reply(pair, tuple(IDS)).ids == Reply(pair, np.array(IDS)).ids == Reply(pair).ids


def test_messages_go_through_the_chat_template(pair: Pair):
    """Turn markers and the opened reply are added."""
    n_words = Reply(pair, MESSAGES, max_tokens=1).done.usage.prompt_tokens
    assert n_words > len("Count from 3 in steps of 4.".split()) + 3
    thinking = Reply(pair, MESSAGES, max_tokens=1, enable_thinking=True)
    assert thinking.done.usage.prompt_tokens > n_words


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("acceptance", ["coupled", "standard"])
def test_greedy_text_does_not_depend_on_the_draft(pair: Pair, acceptance: str, depth: int):
    """Drafted in every round, or never."""
    plain = Reply(pair, speculation="off")
    drafted = Reply(pair, speculation="on", depth=depth, acceptance=acceptance)
    assert (drafted.ids, drafted.text) == (plain.ids, plain.text)
    assert plain.done.timing.drafted == 0
    assert drafted.done.timing.drafted > 0


def test_a_seed_gives_the_same_reply_with_and_without_a_draft(pair: Pair):
    """And another seed another one."""
    hot = {"temperature": 1.5, "top_k": 0, "top_p": 1, "ignore_eos": True}
    plain = Reply(pair, **hot, seed=5)
    assert Reply(pair, **hot, seed=5, speculation="on", depth=3).ids == plain.ids
    assert Reply(pair, **hot, seed=6).ids != plain.ids


def test_what_is_unset_is_the_models_own_generation_config(pair: Pair):
    """Temperature 1, top-k 64 and top-p 0.95 in the demo's; a value given is taken instead."""
    config = json.loads((DEMO_FOLDER / "target" / "generation_config.json").read_text())
    own = {name: config[name] for name in ("temperature", "top_k", "top_p")}
    unset = Reply(pair, seed=3, temperature=None, ignore_eos=True)
    assert unset.ids == Reply(pair, seed=3, **own, ignore_eos=True).ids
    # a flat distribution: only top-k 1 keeps it to the likeliest
    first = Reply(pair, seed=3, temperature=50.0, top_k=1, max_tokens=1, ignore_eos=True)
    assert first.ids == Reply(pair, max_tokens=1, ignore_eos=True).ids


@pytest.mark.parametrize(
    "option",
    [
        {"top_p": 0.01},
        {"top_k": 1},
        {"min_p": 1.0},
    ],
)
def test_each_truncation_reaches_the_sampler(pair: Pair, option: dict[str, Any]):
    """At its extreme each leaves the likeliest id alone, at any temperature."""
    hot = {"temperature": 3.0, "top_k": 0, "top_p": 1, "seed": 1, "ignore_eos": True}
    assert Reply(pair, **hot).ids != Reply(pair, ignore_eos=True).ids
    if "top_p" in option:
        hot["temperature"] = 1.0
    assert Reply(pair, **{**hot, **option}).ids == Reply(pair, ignore_eos=True).ids


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 100}, {"presence_penalty": 2}, {"frequency_penalty": 2}]
)
def test_each_penalty_reaches_the_sampler(pair: Pair, penalty: dict[str, float]):
    """An id that leads another by one is overtaken once it was written."""
    leader = 700
    gap, gap_after = (row[leader] - row for row in pair.logits([*IDS, leader])[-2:])
    fits = (np.abs(gap_after) < 5) & (gap > gap_after - 0.5)
    rival = next(id for id in range(710, 2048) if fits[id])
    bias = {leader: 90 + 1 - float(gap_after[rival]), rival: 90}
    options = {"logit_bias": bias, "ignore_eos": True, "max_tokens": 2}
    assert Reply(pair, **options).ids == [leader, leader]
    assert Reply(pair, **options, **penalty).ids == [leader, rival]


def test_bias_and_suppression_reach_the_sampler(pair: Pair):
    """An id pushed up is chosen, and not where it is forbidden."""
    assert set(Reply(pair, logit_bias={700: 100}).ids) == {700}
    assert 700 not in Reply(pair, logit_bias={700: 100}, suppress_tokens=[700]).ids


def test_an_end_can_be_ignored(pair: Pair):
    """Then only max_tokens ends the reply."""
    ended = Reply(pair, logit_bias={1: 100})
    assert (ended.ids, ended.done.finish_reason) == ([1], "stop")
    going_on = Reply(pair, logit_bias={1: 100}, ignore_eos=True)
    assert (len(going_on.ids), going_on.done.finish_reason) == (12, "length")


@pytest.mark.parametrize("depth", [0, 3])
def test_a_reply_ends_before_its_stop(pair: Pair, depth: int):
    """One text or several; what follows is not shown."""
    free = Reply(pair, MESSAGES, ignore_eos=True)
    stop = free.text[3:5]
    expected = free.text[: free.text.index(stop)]
    for given in (stop, [stop, "never this"]):
        reply = Reply(pair, MESSAGES, ignore_eos=True, stop=given, speculation="on", depth=depth)
        assert (reply.text, reply.done.finish_reason) == (expected, "stop")


@pytest.mark.parametrize("speculation", ["on", "off"])
def test_logprobs_are_the_models_own(pair: Pair, speculation: str):
    """Finite, before any sampling, equal with and without a draft, rivals best first."""
    options = {"logprobs": 2, "temperature": 0.8, "seed": 4, "ignore_eos": True}
    reply = Reply(pair, **options, speculation=speculation, depth=3)
    assert [entry.id for entry in reply.logprobs] == reply.ids
    rows = pair.logits([*IDS, *reply.ids])[len(IDS) - 1 : -1].astype(np.float64)
    expected = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    for entry, row in zip(reply.logprobs, expected, strict=True):
        assert math.isfinite(entry.logprob)
        assert entry.logprob == pytest.approx(row[entry.id], abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:2], abs=1e-4)


def test_without_logprobs_none_are_given(pair: Pair):
    """They cost a pass over the vocabulary."""
    assert Reply(pair).texts[0].logprobs is None


@pytest.mark.parametrize("draft", ["auto", pytest.param("none", marks=pytest.mark.long)])
def test_a_next_turn_goes_on_from_the_last_one(draft: str):
    """It prefills what is new, and writes what it would have written without the cache."""
    turns = [MESSAGES[0]["content"], "And now from 50 on.", "Thank you."]
    written: list[list[str]] = []
    for kv_prefix_cache in (False, True):
        messages: list[dict[str, str]] = []
        cached, texts = list[float](), list[str]()
        with load("demo", draft, kv_prefix_cache=kv_prefix_cache) as pair:
            for n, content in enumerate(turns):
                messages.append({"role": "user", "content": content})
                found = Reply(pair, messages, max_tokens=20, temperature=0.7, seed=n)
                messages.append({"role": "assistant", "content": found.text})
                texts.append(found.text)
                cached.append(found.done.usage.cached_tokens / found.done.usage.prompt_tokens)
            told = pair.status()["kv_prefix_cache"]
        written.append(texts)
        assert cached[0] == 0
        assert [share > 0.6 for share in cached[1:]] == [kv_prefix_cache] * 2
        assert (told["hits"], bool(told["bytes"])) == (2 * kv_prefix_cache, kv_prefix_cache)
    assert written[0] == written[1]


def test_a_reply_closed_early_leaves_the_pair_ready(pair: Pair):
    """Cancelled, and the next one is as ever."""
    events = pair.generate(IDS, max_tokens=2000, temperature=0, ignore_eos=True)
    next(events)
    events.close()
    assert len(Reply(pair, max_tokens=4, ignore_eos=True).ids) == 4


# --- what can't be asked ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param", "part"),
    [
        ({"prompt": "Hello"}, "prompt", "'Hello', must be a list of messages or of token ids"),
        ({"prompt": {"role": "user"}}, "prompt", "must be a list of messages or of token ids"),
        ({"prompt": None}, "prompt", "None, must be a list of messages or of token ids"),
        ({"prompt": 5}, "prompt", "5, must be a list of messages or of token ids"),
        ({"prompt": []}, "prompt", "[], must be at least one message or token id"),
        ({"prompt": [*MESSAGES, 5]}, "prompt", "must be all messages or all token ids"),
        ({"prompt": ["a", "b"]}, "prompt", "must be all messages or all token ids"),
        ({"prompt": [True]}, "prompt", "must be all messages or all token ids"),
        ({"prompt": [2048]}, "prompt", "2048, must be token ids, 0 to 2047"),
        ({"max_tokens": 0}, "max_tokens", "0, must be a whole number of at least 1"),
        ({"depth": 9}, "depth", "9, must be 0 to 8"),
        ({"speculation": "maybe"}, "speculation", "'maybe', must be one of auto, on, off"),
        ({"acceptance": "x"}, "acceptance", "'x', must be one of coupled, standard"),
        ({"temperature": -1}, "temperature", "-1, must be a number at least 0"),
        ({"temperature": math.nan}, "temperature", "nan, must be a number at least 0"),
        ({"top_p": 0}, "top_p", "0, must be a number above 0, at most 1"),
        ({"top_p": 2}, "top_p", "2, must be a number above 0, at most 1"),
        ({"top_k": -1}, "top_k", "-1, must be a whole number of at least 0"),
        ({"min_p": 2}, "min_p", "2, must be a number at least 0, at most 1"),
        ({"presence_penalty": 9}, "presence_penalty", "9, must be a number at least -2, at most 2"),
        ({"seed": "x"}, "seed", "'x', must be -9223372036854775808 to"),
        ({"logit_bias": {2048: 1.0}}, "logit_bias", "2048, must be token ids, 0 to 2047"),
        ({"logit_bias": [1]}, "logit_bias", "[1], must be a map from token id to bias"),
        ({"suppress_tokens": [-1]}, "suppress_tokens", "-1, must be token ids, 0 to 2047"),
        ({"suppress_tokens": 5}, "suppress_tokens", "5, must be a list of token ids"),
        ({"logprobs": 100}, "logprobs", "100, must be 0 to 20"),
        ({"stop": ["a"] * 5}, "stop", "'5 texts', must be at most 4"),
        ({"stop": [""]}, "stop", "('',), must be a list of texts, none of them empty"),
        ({"stop": 5}, "stop", "5, must be a text or a list of texts"),
    ],
)
def test_a_bad_argument_is_refused_when_it_is_given(
    pair: Pair, options: dict[str, Any], param: str, part: str
):
    """Before any work, not at the first id; several used to be taken for something else."""
    arguments = {"prompt": IDS, **options}
    with pytest.raises(InvalidParameter) as raised:
        pair.generate(**arguments)
    assert raised.value.param == param
    assert str(raised.value).startswith(f"{param}: ")
    assert part in str(raised.value)


def test_a_prompt_beyond_the_context_is_refused(pair: Pair):
    """With both numbers; the demo takes 4,096."""
    with pytest.raises(ContextTooLong, match="prompt has 4,090 tokens; this model takes 4,084"):
        list(pair.generate([5] * 4090, max_tokens=12))


# --- status and the end -----------------------------------------------------------------------


def test_status_is_plain_and_says_what_is_loaded():
    """Values that JSON can carry; nothing measured before the first reply."""
    with load("demo") as pair:
        status = pair.status()
        assert json.loads(json.dumps(status)) == status
        assert status["last_reply"] is None
        assert (status["model"], status["draft"]) == ("demo", "demo-assistant")
        assert (status["vocab_size"], status["dtype"]) == (2048, "float32")
        assert status["target_bytes"] > status["draft_bytes"] > 0
        assert status["kv_bytes_per_token"] > 0
        assert status["draft_problem"] is None
        reply = Reply(pair, speculation="on", depth=2)
        last = pair.status()["last_reply"]
    assert last["drafted"] == reply.done.timing.drafted > 0
    assert last["draft_acceptance_rate"] == reply.done.timing.acceptance
    assert last["tokens_per_second"] == reply.done.timing.tokens_per_s


def test_a_closed_pair_says_so():
    """Whatever is asked of it, and closing again is no error."""
    pair = load("demo", None)
    pair.close()
    pair.close()
    uses = (
        lambda: pair.logits(IDS),
        lambda: pair.propose(IDS, 1),
        lambda: list(pair.generate(IDS)),
        lambda: pair.status(),
    )
    for use in uses:
        with pytest.raises(EngineDied, match=r"this engine is closed\. hint: load the pair again"):
            use()


def test_closing_a_pair_gives_its_memory_back():
    """Weights, caches, and what MLX keeps for reuse."""
    gc.collect()
    before = mx.get_active_memory()
    pair = load("demo")
    Reply(pair, max_tokens=3)
    assert mx.get_active_memory() - before > 15e6
    pair.close()
    assert mx.get_active_memory() - before < 1e6


def test_closing_a_pair_ends_the_reply_in_progress():
    """Its reader gets the error, not an end that looks like one."""
    pair = load("demo", None)
    events = pair.generate(IDS, max_tokens=4000, temperature=0, ignore_eos=True)
    next(events)
    pair.close()
    with pytest.raises(EngineDied):
        list(events)


def test_a_script_that_closes_nothing_exits_cleanly():
    """In the middle of a reply that would take minutes."""
    script = (
        "from mlx_worker import load\n"
        "pair = load('demo')\n"
        "events = pair.generate([5, 6], max_tokens=4000, ignore_eos=True, speculation='on')\n"
        "print(type(next(events)).__name__)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    talk = [line for line in ran.stderr.splitlines() if "PyTorch was not found" not in line]
    assert (ran.returncode, ran.stdout, talk) == (0, "Text\n", [])
