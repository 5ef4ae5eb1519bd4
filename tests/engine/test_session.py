"""A reply is the target's own, whatever drafts for it, and it ends exactly where it should."""

import random
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise, product
from typing import Any

import mlx.core as mx
import pytest

from mlx_worker.engine.round import Chosen, Pending
from mlx_worker.engine.session import Session
from mlx_worker.engine.target import Target
from mlx_worker.errors import ContextTooLong, GenerationFailed, InvalidParameter
from mlx_worker.records import GenerationRequest, Progress, Sampling, Text
from tests.tiny import (
    EOS,
    VOCAB,
    WINDOW,
    Guess,
    Script,
    Written,
    tiny_pair,
    tiny_target,
    tiny_tokenizer,
    write,
)

PROMPT = [2, *range(40, 51)]
LONG = 5 * WINDOW

SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=7),
    "hot": Sampling(temperature=1.3, top_p=0.9, seed=-3),
    "family": Sampling(temperature=1.0, top_k=64, top_p=0.95, seed=2**63 + 5),
    "min_p": Sampling(temperature=1.0, min_p=0.05, seed=1),
    "penalised": Sampling(
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        seed=11,
    ),
    "penalised greedy": Sampling(repetition_penalty=1.5, frequency_penalty=0.9),
    "biased": Sampling(
        logit_bias={44: 3.0, 60: -4.0}, suppress_ids=(45, 46), temperature=0.9, seed=5
    ),
}
DRAFTS = ["lookup", "assistant", "centroids", "same_weights", "other_seed"]
OTHER_FAMILY = [("llama", draft) for draft in ("lookup", "same_weights", "other_seed")]
EVERY_PAIR = [*product(["shared", "own"], DRAFTS), *OTHER_FAMILY]


@cache
def plain_reply(shape: str, sampling: str) -> Written:
    """What plain decoding writes: the yardstick."""
    return write(tiny_pair(shape), PROMPT, LONG, sampling=SAMPLINGS[sampling], ignore_eos=True)


def drafted_reply(shape: str, draft: str, sampling: str, depth: int) -> Written:
    return write(
        tiny_pair(shape, draft),
        PROMPT,
        LONG,
        sampling=SAMPLINGS[sampling],
        ignore_eos=True,
        speculation="on",
        depth=depth,
    )


def some_of_the_table() -> Iterator[tuple[str, str, str]]:
    """Every shape, draft and sampling; the long tier has every pair of them."""
    for (i, draft), (j, sampling) in product(enumerate(DRAFTS), enumerate(SAMPLINGS)):
        if (i + 2 * j) % 5 == 0:
            yield ("shared", "own")[(i + j) % 2], draft, sampling


@pytest.mark.parametrize(("shape", "draft", "sampling"), list(some_of_the_table()))
def test_the_reply_does_not_depend_on_the_drafter(shape: str, draft: str, sampling: str):
    """Speculation may change speed, never tokens: across the window, under any sampling."""
    plain = plain_reply(shape, sampling)
    drafted = drafted_reply(shape, draft, sampling, 4)
    assert (drafted.ids, drafted.text) == (plain.ids, plain.text)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("depth", range(9))
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("shape", "draft"), EVERY_PAIR)
def test_the_reply_does_not_depend_on_drafter_and_depth(
    shape: str, draft: str, sampling: str, depth: int
):
    """The whole table: every drafter at every depth."""
    plain = plain_reply(shape, sampling)
    drafted = drafted_reply(shape, draft, sampling, depth)
    assert (drafted.ids, drafted.text) == (plain.ids, plain.text)


def partly_accepted() -> Iterator[Any]:
    """In the default tier each depth once, and every shape with every sampling; all in long."""
    shapes, samplings = ["shared", "own", "llama"], ["greedy", "sampled", "penalised"]
    for (i, shape), depth, (j, sampling) in product(
        enumerate(shapes), range(9), enumerate(samplings)
    ):
        marks = [] if (i, j) == divmod(depth, 3) else [pytest.mark.long]
        yield pytest.param(shape, depth, sampling, marks=marks)


@pytest.mark.parametrize(("shape", "depth", "sampling"), list(partly_accepted()))
def test_partial_acceptance_leaves_the_reply_alone(shape: str, depth: int, sampling: str):
    """Drafts right about two times in three, so that rounds end at every possible length."""
    plain = plain_reply(shape, sampling)
    chance = random.Random(depth)
    drafted = write(
        tiny_pair(shape),
        PROMPT,
        LONG,
        drafter=Guess(plain.ids, lambda i: chance.random() < 0.67),
        sampling=SAMPLINGS[sampling],
        ignore_eos=True,
        speculation="on",
        depth=depth,
    )
    assert drafted.ids == plain.ids
    if depth:
        assert 0 < drafted.done.timing.accepted < drafted.done.timing.drafted


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 6))]
)
@pytest.mark.parametrize("shape", ["shared", "own"])
def test_switching_between_plain_and_drafting_leaves_the_reply_alone(shape: str, seed: int):
    """Forced exits at any moment, zero-depth segments right after a partial acceptance included."""
    chosen = Sampling(temperature=0.9, repetition_penalty=1.1, seed=seed)
    plain = write(tiny_pair(shape), PROMPT, 2 * LONG, sampling=chosen, ignore_eos=True)
    chance = random.Random(seed)
    plans = [(chance.choice([0, 0, 1, 2, 5, 8]), chance.randint(1, 9)) for _ in range(60)]
    switched = write(
        tiny_pair(shape, "lookup"),
        PROMPT,
        2 * LONG,
        pacer=Script(plans),
        drafter=Guess(plain.ids, lambda i: chance.random() < 0.6),
        sampling=chosen,
        ignore_eos=True,
    )
    assert switched.ids == plain.ids


@pytest.mark.parametrize("draft", ["same_weights", "other_seed", "lookup"])
def test_a_drafter_catches_up_after_plain_segments(draft: str):
    """Plain segments between rounds neither lose nor double an id in the drafter's own context."""
    chosen = Sampling(temperature=0.8, seed=4)
    plain = write(tiny_pair("own"), PROMPT, LONG, sampling=chosen, ignore_eos=True)
    mixed = write(
        tiny_pair("own", draft),
        PROMPT,
        LONG,
        pacer=Script([(3, 4), (0, 5)] * 20),
        sampling=chosen,
        ignore_eos=True,
    )
    assert mixed.ids == plain.ids
    if draft == "same_weights":
        assert mixed.done.timing.acceptance == 1.0


def test_a_draft_with_the_targets_own_weights_is_always_accepted():
    """Draft and target meet the same noise at the same position."""
    drafted = write(
        tiny_pair("own", "same_weights"),
        PROMPT,
        LONG,
        sampling=SAMPLINGS["family"],
        ignore_eos=True,
        speculation="on",
        depth=4,
    )
    assert drafted.done.timing.acceptance == 1.0


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("right", [True, False])
def test_max_tokens_is_exact(max_tokens: int, right: bool):
    """A round that could overshoot the cap never does: 1, 2, k, k + 1 and on."""
    plain = write(tiny_pair("own"), PROMPT, max_tokens, ignore_eos=True)
    drafted = write(
        tiny_pair("own"),
        PROMPT,
        max_tokens,
        drafter=Guess(plain.ids, lambda i: right),
        ignore_eos=True,
        speculation="on",
        depth=4,
    )
    assert drafted.ids == plain.ids
    assert len(drafted.ids) == max_tokens == drafted.done.usage.completion_tokens
    assert drafted.done.finish_reason == "length"


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("depth", [0, 4])
def test_eos_inside_a_round_ends_the_reply_there(place: int, depth: int):
    """Accepted drafts behind an EOS are neither sent nor counted, nor left in the caches."""
    free = write(tiny_pair("own"), PROMPT, 16, ignore_eos=True)
    eos = free.ids[place]
    first = free.ids.index(eos)
    ended = write(
        tiny_pair("own", eos_ids=frozenset({eos})),
        PROMPT,
        16,
        drafter=Guess(free.ids, lambda i: True),
        speculation="on",
        depth=depth,
    )
    assert ended.ids == free.ids[: first + 1]
    assert ended.done.finish_reason == "stop"
    assert ended.done.usage.completion_tokens == first + 1
    assert ended.session.timelines.n_pending == 0
    assert ended.session.timelines.committed == PROMPT + free.ids[:first]


@pytest.mark.parametrize("ending", ["eos", "stop", "length"])
@pytest.mark.parametrize("depth", [0, 1, 4, 8])
def test_every_id_of_a_reply_is_counted_once(depth: int, ending: str):
    """Drafts behind an ending used to count as accepted: 8 of 8 in a round that kept one id."""
    free = write(tiny_pair("own"), PROMPT, 16, ignore_eos=True)
    eos = frozenset({free.ids[5]}) if ending == "eos" else frozenset({EOS})
    ended = write(
        tiny_pair("own", eos_ids=eos),
        PROMPT,
        16 if ending != "length" else 7,
        drafter=Guess(free.ids, lambda i: True),
        stop=(free.text[6:8],) if ending == "stop" else (),
        speculation="on",
        depth=depth,
    )
    timing = ended.done.timing
    n_plain_steps = timing.target_passes - 1 - timing.rounds
    assert 1 + n_plain_steps + timing.round_tokens == timing.completion_tokens
    assert timing.round_tokens - timing.rounds <= timing.accepted <= timing.round_tokens


def test_a_broken_distribution_behind_an_eos_fails_nothing():
    """A round looks past the EOS it will end at; what is wrong there is nobody's business."""
    free = write(tiny_pair("own"), PROMPT, 16, ignore_eos=True)
    chosen = Chosen([free.ids[0], EOS, -1], 2, mx.zeros((3, 1)), 0, None, None)
    session = Session(tiny_pair("own"), GenerationRequest(tuple(PROMPT), 16))
    assert session._keep(chosen).ids == [free.ids[0], EOS]


def test_eos_at_the_cap_is_a_stop():
    """A cap reached by the EOS itself does not hide the stop."""
    free = write(tiny_pair("own"), PROMPT, 16, ignore_eos=True)
    n = free.ids.index(free.ids[6]) + 1
    ended = write(tiny_pair("own", eos_ids=frozenset({free.ids[6]})), PROMPT, n)
    assert ended.done.finish_reason == "stop"


def test_eos_text_is_not_part_of_the_reply():
    """The id that ends a reply is counted, its text is not shown."""
    free = write(tiny_pair("own"), PROMPT, 16, ignore_eos=True)
    ended = write(tiny_pair("own", eos_ids=frozenset({free.ids[9]})), PROMPT, 16)
    assert free.text.startswith(ended.text)
    assert len(ended.text.encode()) < len(free.text.encode())


@pytest.mark.parametrize("draft", [None, "other_seed"])
@pytest.mark.parametrize("ending", ["length", "eos", "stop"])
def test_the_ledger_is_what_is_cached_after_every_ending(draft: str | None, ending: str):
    """Prompt and reply without the last chosen id, and nothing queued: what the next turn needs."""
    free = write(tiny_pair("own"), PROMPT, 24, ignore_eos=True)
    eos = frozenset({free.ids[11]}) if ending == "eos" else frozenset({EOS})
    stop = (free.text[14:17],) if ending == "stop" else ()
    written = write(
        tiny_pair("own", draft, eos_ids=eos), PROMPT, 24, stop=stop, speculation="on", depth=3
    )
    timelines = written.session.timelines
    assert timelines.n_pending == 0
    assert timelines.committed == PROMPT + written.ids[:-1]
    assert {layer.offset for layer in timelines.layers} == {len(timelines.committed)}


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("n_events", [1, 2, 6])
def test_a_cancelled_reply_leaves_only_what_it_sent(n_events: int, depth: int):
    """Closed mid-prefill or mid-reply, with work queued ahead: the caches hold the ledger alone."""
    request = GenerationRequest(tuple(PROMPT), 40, ignore_eos=True, speculation="on", depth=depth)
    session = Session(tiny_pair("own", "other_seed"), request, chunk_tokens=8)
    events = session.events()
    sent = [id for event in islice(events, n_events) if isinstance(event, Text) for id in event.ids]
    assert isinstance(events, Generator)
    events.close()
    timelines = session.timelines
    assert {layer.offset for layer in timelines.layers} == {len(timelines.committed)}
    assert [*PROMPT, *sent][: len(timelines.committed)] == timelines.committed


def test_a_stop_that_only_the_last_flush_completes_is_a_stop():
    """What was waiting for more bytes at the cap can be the stop itself."""
    half = tiny_tokenizer().encode("é", add_special_tokens=False)[0]
    forced = Sampling(logit_bias={half: 100.0})
    ended = write(tiny_pair("own"), PROMPT, 1, sampling=forced, stop=("\ufffd",))
    assert (ended.text, ended.done.finish_reason) == ("", "stop")


@pytest.mark.parametrize("speculation", ["off", "on"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=5.0, seed=1)])
def test_an_id_without_a_token_is_never_chosen(sampling: Sampling, speculation: str):
    """Many a network has more rows than its tokenizer has tokens."""
    named = 259
    wanted = replace(sampling, logit_bias={VOCAB - 1: 100.0, named: 100.0})
    free = write(tiny_pair("own", "lookup"), PROMPT, 24, sampling=wanted, ignore_eos=True)
    assert max(free.ids) >= named
    short = tiny_pair("own", "lookup", tokenizer=tiny_tokenizer(named))
    held = write(
        short, PROMPT, 24, sampling=wanted, ignore_eos=True, speculation=speculation, depth=3
    )
    assert max(held.ids) < named


def test_rounds_emit_what_they_kept_at_once():
    """A fully accepted round of depth 4 arrives as one piece of five ids."""
    plain = write(tiny_pair("own"), PROMPT, 16, ignore_eos=True)
    drafted = write(
        tiny_pair("own"),
        PROMPT,
        16,
        drafter=Guess(plain.ids, lambda i: True),
        ignore_eos=True,
        speculation="on",
        depth=4,
    )
    sizes = [len(event.ids) for event in drafted.events if isinstance(event, Text)]
    assert sizes == [1, 5, 5, 5]
    assert drafted.done.timing.target_passes == 4
    assert drafted.done.timing.tokens_per_round == 5.0


@pytest.mark.parametrize("draft", [None, "other_seed", "lookup"])
def test_logprobs_do_not_depend_on_the_draft(draft: str | None):
    """The raw distribution's figures, equal to 1e-4 with and without a draft."""
    chosen = Sampling(temperature=0.8, seed=3, logprobs=2, repetition_penalty=1.2)
    plain = write(tiny_pair("own"), PROMPT, 24, sampling=chosen, ignore_eos=True)
    drafted = write(
        tiny_pair("own", draft),
        PROMPT,
        24,
        sampling=chosen,
        ignore_eos=True,
        speculation="on",
        depth=4,
    )
    assert [entry.id for entry in drafted.logprobs] == drafted.ids == plain.ids
    for ours, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, WINDOW - 1, WINDOW + 1, 512])
def test_the_reply_does_not_depend_on_the_prefill_chunk(chunk: int):
    """Prompts of several windows, prefilled in any pieces."""
    prompt = [2] + [3 + (7 * i) % 200 for i in range(4 * WINDOW)]
    whole = write(tiny_pair("shared"), prompt, 16, ignore_eos=True)
    pieces = write(
        tiny_pair("shared", "assistant"),
        prompt,
        16,
        chunk_tokens=chunk,
        ignore_eos=True,
        speculation="on",
        depth=3,
    )
    assert pieces.ids == whole.ids


def test_prefill_reports_progress_chunk_by_chunk():
    """A client that leaves during a long prompt is noticed between chunks."""
    written = write(tiny_pair("own"), [2] * 30, 2, chunk_tokens=8, ignore_eos=True)
    done = [e.prompt_tokens_done for e in written.events if isinstance(e, Progress)]
    assert done[-1] == 30
    assert all(0 < b - a <= 8 for a, b in pairwise([0, *done]))


def test_speculation_off_never_drafts():
    """`off` is the plain path even where a draft is loaded."""
    written = write(tiny_pair("own", "same_weights"), PROMPT, 12, speculation="off", depth=4)
    assert written.done.timing.drafted == 0


def test_the_pacer_hears_every_round_and_only_under_auto():
    """Rounds under `on` are not the pacer's business; under `auto` each one is reported."""
    pacer = Script([(2, 6), (0, 4)])
    write(tiny_pair("own", "same_weights"), PROMPT, 13, pacer=pacer, ignore_eos=True)
    assert [heard.depth for heard in pacer.heard] == [2, 2] + [0] * 6
    assert [heard.accepted for heard in pacer.heard] == [2, 2] + [0] * 6
    assert [heard.context_tokens for heard in pacer.heard][:4] == [12, 15, 18, 19]
    silent = Script([(2, 6)])
    write(tiny_pair("own", "same_weights"), PROMPT, 13, pacer=silent, speculation="on")
    assert silent.heard == []


@pytest.mark.parametrize("draft", [None, "lookup", "same_weights"])
def test_a_reply_whose_every_id_is_masked_fails_alone(draft: str | None):
    """The request gets a clear error, and the next one is served as ever."""
    everything = Sampling(suppress_ids=tuple(range(VOCAB)))
    pair = tiny_pair("own", draft)
    with pytest.raises(GenerationFailed, match="no usable distribution"):
        write(pair, PROMPT, 8, sampling=everything, speculation="on", depth=3)
    assert len(write(pair, PROMPT, 8, ignore_eos=True).ids) == 8


class Broken(Target):
    """A target whose weights have gone bad: every logit is NaN after the first pass."""

    n_passes = 0

    def head(self, hidden: mx.array) -> mx.array:
        self.n_passes += 1
        return super().head(hidden) * (1.0 if self.n_passes == 1 else float("nan"))


@pytest.mark.parametrize("sampling", ["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("draft", [None, "same_weights"])
def test_a_reply_without_a_number_in_its_logits_fails(draft: str | None, sampling: str):
    """NaN is found on the plain path and in rounds, whatever picks the ids."""
    pair = tiny_pair("own", draft, target=Broken(tiny_target("own").model, VOCAB, 4096))
    with pytest.raises(GenerationFailed, match="no usable distribution"):
        write(pair, PROMPT, 8, sampling=SAMPLINGS[sampling], speculation="on", depth=3)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error"),
    [
        ([], 4, InvalidParameter),
        ([VOCAB], 4, InvalidParameter),
        ([-1], 4, InvalidParameter),
        ([5], 0, InvalidParameter),
        ([5] * 4000, 200, ContextTooLong),
        ([5], 5000, InvalidParameter),
    ],
)
def test_what_the_model_cannot_be_asked_is_refused_before_any_work(
    prompt: list[int], max_tokens: int, error: type[Exception]
):
    """The message names the value and the limit."""
    with pytest.raises(error):
        write(tiny_pair("own"), prompt, max_tokens)


def test_choices_of_one_call_differ():
    """Reply i of n uses noise index i, so that n replies to one seed are n replies."""
    chosen = Sampling(temperature=1.0, seed=9)
    replies = {
        tuple(write(tiny_pair("own"), PROMPT, 12, sampling=chosen, choice=i).ids) for i in range(3)
    }
    assert len(replies) == 3


@pytest.mark.parametrize("place", range(3, 9))
def test_the_pacer_hears_of_no_id_that_the_reply_has_not(place: int):
    """A round cut by a stop on one of its drafts was counted one id too many."""
    whole = write(tiny_pair("own"), PROMPT, 13, ignore_eos=True)
    pair = tiny_pair("own", "same_weights", eos_ids=frozenset({whole.ids[place]}))
    pacer = Script([(3, 99)])
    reply = write(pair, PROMPT, 13, pacer=pacer)
    assert sum(heard.accepted + 1 for heard in pacer.heard) == len(reply.ids) - 1


def test_the_pacer_is_told_of_the_end_even_when_the_caches_fail(monkeypatch: pytest.MonkeyPatch):
    """Else its controller takes every later request for one that overlaps."""
    pacer = Script([(2, 99)])
    request = GenerationRequest(tuple(PROMPT), 12, ignore_eos=True)
    session = Session(tiny_pair("own", "same_weights"), request, pacer)
    events = session.events()
    for _ in range(4):
        next(events)

    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(session.timelines, "settle", fail)
    with pytest.raises(RuntimeError):
        events.close()
    assert pacer.n_ends == 1


def test_an_id_is_handed_over_before_the_cpu_begins_the_next_step(monkeypatch: pytest.MonkeyPatch):
    """It takes a step in only when it is nearly through, so the id would come a whole step late."""
    started = 0
    start = Pending.start

    def counted(pending: Pending) -> Pending:
        nonlocal started
        started += 1
        return start(pending)

    monkeypatch.setattr(Pending, "start", counted)
    request = GenerationRequest(tuple(PROMPT), 9, ignore_eos=True)
    texts = [started for event in Session(tiny_pair(), request).events() if type(event) is Text]
    assert mx.default_device() == mx.Device(mx.cpu)
    assert texts == list(range(1, 10))
