"""One request: prefill in chunks, then plain segments and rounds until it is done.

Owns the life of a reply: what is kept of each round (EOS, stop strings and max_tokens cut it before
anything is committed or sent), the ledger, the text, and the timing. Leaves the inner loop to
round.py and the choice of depth to the request or the pacer. Engine thread only.

Every segment leaves the caches holding exactly the committed ids: prompt and reply without the
last chosen id, whose keys and values are not cached yet.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

import mlx.core as mx

from mlx_worker.engine import round as rounds
from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.load import LoadedPair
from mlx_worker.engine.markers import Kind, Markers, opening
from mlx_worker.engine.prefix import DRAFT, TARGET, Conversation, PrefixCache, Scope
from mlx_worker.engine.round import Chosen, Cursor
from mlx_worker.engine.sample import Sampler
from mlx_worker.engine.text import ReplyText
from mlx_worker.engine.validate import validate
from mlx_worker.errors import ContextTooLong, GenerationFailed, InvalidParameter
from mlx_worker.records import (
    DEFAULT_DEPTH,
    LOCAL,
    Done,
    Event,
    FinishReason,
    GenerationRequest,
    Notice,
    Pacer,
    Plan,
    Progress,
    Round,
    Text,
    Timing,
    TokenLogprob,
    Usage,
)

PREFILL_CHUNK_TOKENS = 512
CLEAR_TOKENS = 256  # MLX keeps freed buffers of every length seen; let go of them this often


class Session:
    """Everything one reply needs, from its first prompt id to its Done."""

    def __init__(
        self,
        pair: LoadedPair,
        request: GenerationRequest,
        pacer: Pacer | None = None,
        *,
        prefixes: PrefixCache | None = None,
        scope: str = LOCAL,
        chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    ) -> None:
        check(pair, request)
        self._pair = pair
        self._target = pair.target
        self._request = request
        self._pacer = pacer if request.speculation == "auto" else None
        self._chunk_tokens = chunk_tokens
        self._prefixes = PrefixCache(0) if prefixes is None else prefixes
        self._conversations: list[Conversation] = []
        self.timelines = self._begun((scope, TARGET), Timelines(pair.target.model))
        self._n_reused = len(self.timelines.committed)
        prompt = request.prompt_ids
        suppress = (*request.sampling.suppress_ids, *pair.nameless_ids)
        sampling = replace(request.sampling, suppress_ids=suppress)
        vocab_size = pair.target.vocab_size
        self._sampler = Sampler(sampling, vocab_size, prompt, choice=request.choice)
        may_draft = request.speculation == "on" or self._pacer is not None
        own = partial(self._begun, (scope, DRAFT))
        self.drafter = pair.drafter(self.timelines, self._sampler, own) if may_draft else None
        self._constraint = pair.constraint(request)
        markers = pair.markers if request.may_call else pair.markers.without_calls
        markers = markers if request.reads_markers else Markers({})
        is_thinking = bool(opening(prompt, markers))
        self._text = ReplyText(pair.tokenizer, request.stop, markers, is_thinking)
        self._kinds: list[Kind] = []  # of the ids that _keep kept last
        self._finish: FinishReason | None = None
        self._n_ids = self._n_cleared = 0
        self._n_rounds = self._n_round_ids = self._n_passes = 0
        self._n_drafted = self._n_accepted = 0
        self._started = self._last_read = perf_counter()
        self._first_id = self._last_id = self._started

    def events(self) -> Generator[Event, None, None]:
        """Progress while prefilling, Text as ids come, one Done. Closing it cancels.

        However it ends, the caches then hold the committed ids and nothing else, and the pacer
        has been told.
        """
        is_sound = False
        try:
            yield from self._reply()
            is_sound = True
        except GeneratorExit:  # the client left; what is committed is as good as ever
            is_sound = True
            raise
        finally:
            try:
                for conversation in self._conversations:
                    conversation.timelines.settle()
                    if is_sound:
                        self._prefixes.keep(conversation)
            finally:
                if self._pacer is not None:
                    self._pacer.end()

    def _begun(self, scope: Scope, empty: Timelines) -> Timelines:
        """Caches that hold what is kept of the prompt, in place of empty ones."""
        found = self._prefixes.begin(scope, self._request.prompt_ids, empty)
        self._conversations.append(found)
        return found.timelines

    def _reply(self) -> Iterator[Event]:
        pending = yield from self._prefill()
        if self.drafter is not None:
            self.drafter.begin(self._request.prompt_ids)
        chosen = pending.read()
        self._first_id = self._last_read = perf_counter()
        self._n_passes += 1
        if self._prefixes.budget_bytes:
            self._conversations[0].mark()
        kept = self._keep(chosen)
        cursor = self._after_segment(kept, kept.ids, 0)
        yield self._event(kept)
        plan = self._next_plan()
        while plan is not None:
            run = self._rounds if plan.depth > 0 else self._plain
            cursor, plan = yield from run(cursor, plan)
        yield self._done()

    def _prefill(self) -> Iterator[Event]:
        """Cache the prompt in chunks; returns the queued pass that chooses the first id."""
        prompt = list(self._request.prompt_ids)
        n_last = self._chunk_tokens if self._target.is_separable else 1
        done = self._n_reused
        while len(prompt) - done > n_last:
            chunk = prompt[done : min(done + self._chunk_tokens, len(prompt) - 1)]
            self._target.hidden(mx.array([chunk]), self.timelines.layers)
            self.timelines.evaluate()
            self.timelines.commit(chunk)
            mx.clear_cache()
            done += len(chunk)
            yield Progress(done, len(prompt))
        last = prompt[done:]
        pending = rounds.first_step(
            self._target, self.timelines, self._sampler, mx.array(last), self._constraint
        )
        self.timelines.commit(last)
        yield Progress(len(prompt), len(prompt))
        return pending

    def _next_plan(self) -> Plan | None:
        """What the next segment does; None once the reply is over."""
        if self._finish is not None:
            return None
        remaining = self._request.max_tokens - self._n_ids
        if self.drafter is None:
            return Plan(0, remaining)
        if self._pacer is not None:
            return self._pacer.plan()
        depth = DEFAULT_DEPTH if self._request.depth is None else self._request.depth
        return Plan(depth, remaining)

    def _plain(
        self, cursor: Cursor, plan: Plan
    ) -> Generator[Event, None, tuple[Cursor, Plan | None]]:
        """A pipelined plain segment of up to plan.tokens ids; returns what follows it."""
        n_steps = min(max(1, plan.tokens), self._request.max_tokens - self._n_ids)
        steps = self._steps(cursor, n_steps)
        bonus, kept, ids = cursor.bonus, None, []
        for chosen in steps:
            n_context = len(self.timelines.committed)
            self._last_id = perf_counter()
            self.timelines.commit([bonus])
            kept = self._keep(chosen)
            self._observe(0, chosen, kept, n_context)
            bonus = kept.ids[-1]
            ids.append(bonus)
            yield self._event(kept)
            if self._finish is not None:
                break
        steps.close()  # what it built ahead is rewound below
        assert kept is not None
        return self._after_segment(kept, ids, 0), self._next_plan()

    def _steps(self, cursor: Cursor, n_steps: int) -> Generator[Chosen, None, None]:
        where = self._target, self.timelines, self._sampler, cursor, n_steps
        if self._constraint is None:
            return rounds.plain_steps(*where)
        return rounds.constrained_steps(*where, self._constraint)

    def _rounds(
        self, cursor: Cursor, plan: Plan
    ) -> Generator[Event, None, tuple[Cursor, Plan | None]]:
        """Draft-and-verify rounds until a plan is plain; returns what follows them.

        The next round is queued before the text of this one is handed over, so that the device
        works while the host and the client do; also where a new plan asks for another depth.
        """
        until = self._n_ids + plan.tokens
        pending = self._launch(cursor, plan.depth)
        while True:
            n_context = len(self.timelines.committed)
            chosen = pending.read()
            self._last_id = perf_counter()
            kept = self._keep(chosen)
            self._observe(plan.depth, chosen, kept, n_context)
            self.timelines.commit([cursor.bonus, *kept.ids[:-1]])
            cursor = self._after_segment(kept, kept.ids, n_accepted(chosen, kept))
            following: Plan | None = plan
            if self._finish is not None or self._n_ids >= until:
                following = self._next_plan()
                until = self._n_ids + (following.tokens if following else 0)
            if following is not None and following.depth > 0:
                plan = following
                pending = self._launch(cursor, plan.depth)
                yield self._event(kept)
            else:
                yield self._event(kept)
                return cursor, following

    def _launch(self, cursor: Cursor, depth: int) -> rounds.Pending:
        """A round never drafts past the last id that may be kept."""
        n_useful = min(depth, self._request.max_tokens - self._n_ids - 1)
        return rounds.launch(
            self._target,
            self.drafter,
            self.timelines,
            self._sampler,
            cursor,
            n_useful,
            self._request.acceptance,
            self._constraint,
        )

    def _after_segment(self, kept: Chosen, ids: Sequence[int], n_accepted: int) -> Cursor:
        """Rewind the caches to the ledger and tell the drafter what was chosen."""
        self.timelines.settle()
        if self.drafter is not None:
            self.drafter.commit(ids, n_accepted)
        return kept.cursor(self._sampler)

    def _keep(self, chosen: Chosen) -> Chosen:
        """Cut a round's ids at the reply's end, take their text, and tell the grammar."""
        self._kinds = []
        for n, id in enumerate(chosen.ids, start=1):
            if id < 0:
                raise GenerationFailed(
                    "the model gave no usable distribution (NaN, infinite, or every id masked)",
                    hint="loosen logit_bias and suppress_tokens, or check the checkpoint's weights",
                )
            self._n_ids += 1
            self._finish = self._end(id)
            if self._finish is not None:
                self._text.finish()
                self._finish = "stop" if self._text.is_hit else self._finish
                chosen = chosen.first(n)
                break
        if self._constraint is not None:
            self._constraint.advance(chosen.ids)
        return chosen

    def _end(self, id: int) -> FinishReason | None:
        """Take one id in; whether the reply ends with it, and why."""
        request, text = self._request, self._text
        if id in self._pair.eos_ids and not request.ignore_eos:
            self._kinds.append("control")
            return "stop"
        self._kinds.append(text.push(id))
        if text.is_hit or text.follower.n_calls == request.max_calls:
            return "stop"
        return "length" if self._n_ids >= request.max_tokens else None

    def _event(self, kept: Chosen) -> Text:
        logprobs: tuple[TokenLogprob, ...] | None = None
        if kept.logprobs is not None:
            logprobs = tuple(
                replace(one, is_content=kind == "content")
                for one, kind in zip(kept.logprobs, self._kinds, strict=False)
            )
        piece, marks = self._text.take()
        return Text(tuple(kept.ids), piece, logprobs, marks)

    def _observe(self, depth: int, chosen: Chosen, kept: Chosen, n_context: int) -> None:
        """Count what was kept of what was read; the pacer hears of it where it is in charge."""
        n_own = max(0, n_accepted(chosen, kept) - chosen.n_forced)
        self._n_passes += 1
        if depth > 0:
            self._n_rounds += 1
            self._n_round_ids += len(kept.ids)
        self._n_drafted += chosen.n_drafted - chosen.n_forced
        self._n_accepted += n_own
        if self._pacer is not None:
            round_ms = (self._last_id - self._last_read) * 1000
            # A round that the reply's end cut gave no id of the target's own: it counts one fewer.
            accepted = len(kept.ids) - 1
            self._pacer.observe(
                Round(depth, chosen.n_drafted, accepted, round_ms, n_context, chosen.n_forced)
            )
        self._last_read = self._last_id
        if self._n_ids - self._n_cleared >= CLEAR_TOKENS:
            self._n_cleared = self._n_ids
            mx.clear_cache()

    def _done(self) -> Done:
        assert self._finish is not None
        now = perf_counter()
        timing = Timing(
            latency_ms=(now - self._started) * 1000,
            ttft_ms=(self._first_id - self._started) * 1000,
            decode_ms=max(0.0, self._last_id - self._first_id) * 1000,
            completion_tokens=self._n_ids,
            rounds=self._n_rounds,
            round_tokens=self._n_round_ids,
            target_passes=self._n_passes,
            drafted=self._n_drafted,
            accepted=self._n_accepted,
        )
        n_thinking = self._text.follower.n_thinking
        usage = Usage(len(self._request.prompt_ids), self._n_ids, self._n_reused, n_thinking)
        return Done(self._finish, usage, timing, self._notice())

    @property
    def _is_cut(self) -> bool:
        """Whether it ended inside a call, or before what its grammar asks for was whole."""
        if self._finish == "length" and self._text.follower.is_calling:
            return True
        constraint, grammar = self._constraint, self._request.grammar
        if constraint is None or grammar is None:
            return False
        if not constraint.is_complete:
            return True
        # A stop text took away a part of the document, max_tokens perhaps the rest of a number.
        may_be_cut = self._text.is_hit or (self._finish == "length" and constraint.may_go_on)
        return may_be_cut and not grammar.is_call

    def _notice(self) -> Notice | None:
        """What the reply's end cut off."""
        if self._finish == "length" and self._text.follower.is_thinking:
            return "truncated_during_reasoning", (
                f"max_tokens ({self._request.max_tokens:,}) ended the reply while the model was "
                "still thinking; hint: raise it, or set reasoning_effort to none"
            )
        if self._is_cut:
            who = "a stop text" if self._text.is_hit else "the model"
            what = "max_tokens" if self._finish == "length" else who
            return "truncated_during_structured_output", (
                f"{what} ended the reply before what was asked for was whole; "
                "what there is may not parse"
            )
        return None


def generate_events(
    pair: LoadedPair,
    request: GenerationRequest,
    pacer: Pacer | None = None,
    prefixes: PrefixCache | None = None,
    scope: str = LOCAL,
) -> Generator[Event, None, None]:
    """Write one reply. Raises RequestError before the first event, GenerationFailed during it."""
    return Session(pair, request, pacer, prefixes=prefixes, scope=scope).events()


def n_accepted(chosen: Chosen, kept: Chosen) -> int:
    """Drafts that made it into the reply: those behind an EOS, a stop or the cap did not."""
    return min(len(kept.ids), len(chosen.ids) - 1)


def check(pair: LoadedPair, request: GenerationRequest) -> None:
    """Raises RequestError for what this model can't be asked."""
    validate(request, pair.target.vocab_size)
    n_prompt, limit = len(request.prompt_ids), pair.target.context_limit
    if request.max_tokens >= limit:
        bound = f"below {limit:,}, the context of the model"
        raise InvalidParameter("max_tokens", request.max_tokens, bound)
    if n_prompt + request.max_tokens > limit:
        share = f"{request.max_tokens:,} of the {limit:,} it can hold"
        hint = f"shorten the prompt, or lower max_tokens, which takes {share}"
        raise ContextTooLong(tokens=n_prompt, limit=limit - request.max_tokens, hint=hint)
