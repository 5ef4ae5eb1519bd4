"""Choosing ids: processors, truncation and the noise that replaces random draws.

Owns everything between a row of logits and an id, for the target's rows and for a drafter's. What
is kept of a draft is accept.py's. Runs on the engine thread; every function only builds lazy
arrays, none reads a value back.

An id is drawn as `argmax(scores / T + G)`, with G a fixed function of (seed, choice, position,
id). So the id at a position depends neither on how many rows a pass has nor on which other
candidates exist: a drafter that scores a subset of the vocabulary meets the same noise.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

import mlx.core as mx

from mlx_worker.records import Sampling

Stream = Literal["choose", "draft", "residual", "accept"]
SamplerState = mx.array | None  # (V,) float32 counts of the reply's ids; None: no penalty is set

# choose: the coupled rule and plain decoding. The other three belong to the standard rule, which
# is biased if any two of its draws share noise.
STREAMS: tuple[Stream, ...] = ("choose", "draft", "residual", "accept")

SEED_BITS = 64
LEAST_LOGPROB = -9999.0  # stands for minus infinity in a reply: JSON has no infinity
MOST_UNIFORM = 1 - 2.0**-24  # the largest float32 below 1

# Fusing saves launches on Metal. On a CPU the first use of each fused shape runs g++ for up to a
# second, which costs more than thousands of unfused calls.
_fused: Callable[[Any], Any] = mx.compile if mx.metal.is_available() else lambda function: function


# (N, 2) uint32 keys → (N, 2) uint32 words: Threefry-2x32-20 of the counter (0, 1) under each key.
# MLX's own key split is exactly that, in one kernel; written out in array operations it is 110.
_hashed = mx.vmap(lambda key: mx.random.split(key, 1)[0])


def mixed(keys: mx.array, data: mx.array) -> mx.array:
    """Derive keys: hash each key after adding the data to its second word, modulo 2³².

    keys  (..., 2) uint32, already hashed once, or two different data could undo each other
    data  (...)    non-negative integers that broadcast with the keys

    Returns (..., 2) uint32.
    Source of the hash: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    second = keys[..., 1] + data.astype(mx.uint32)
    pairs = mx.stack([mx.broadcast_to(keys[..., 0], second.shape), second], axis=-1)
    return _hashed(pairs.reshape(-1, 2)).reshape(pairs.shape)


def stream_keys(seed: int, choice: int) -> mx.array:
    """The (4, 2) uint32 keys of the streams, in the order of STREAMS.

    seed    any integer, taken modulo 2⁶⁴ (so −1 is 2⁶⁴ − 1); its low word is the key's first
    choice  index of the reply among the n of one call
    """
    seed %= 1 << SEED_BITS
    root = _hashed(mx.array([[seed & 0xFFFFFFFF, seed >> 32]], mx.uint32))
    return mixed(mixed(root, mx.array(choice)), mx.arange(len(STREAMS)))


@_fused
def gumbel(bits: mx.array) -> mx.array:
    """Turn uint32 bits into float32 standard Gumbel variates, of the same shape.

    u = (bits + 0.5) · 2⁻³² and G = −log(−log1p(−u)). Large G come from small u, and there the
    float32 arithmetic is exact: bits below 2²³ convert and add 0.5 without rounding, a power of
    two scales without rounding, and log1p keeps what 1 − u would lose. So the upper tail reaches
    G = 22.9. At the other end u rounds, and 1 itself would give −infinity: u is capped at
    1 − 2⁻²⁴, G at no less than −2.8, which touches one id in 2²⁵.
    """
    u = mx.minimum((bits.astype(mx.float32) + 0.5) * 2.0**-32, MOST_UNIFORM)
    return -mx.log(-mx.log1p(-u))


def noise(key: mx.array, positions: mx.array, ids: mx.array) -> mx.array:
    """Gumbel noise of ids at positions: the first word of the key mixed with position, then id.

    key        (2,) uint32, one of stream_keys
    positions  non-negative integers, any shape that broadcasts with ids: (R, 1) for rows
    ids        non-negative integers: (m,) shared by the rows, or (R, m)

    Returns float32 of the broadcast shape. 64 ids take 0.05 ms, 4,096 0.2 (2-core EPYC).
    """
    return gumbel(mixed(mixed(key, positions), ids)[..., 0])


def _row_positions(position: int | mx.array, n_rows: int) -> mx.array:
    """(R, 1) uint32 positions of rows that follow each other; made on the host when it can be."""
    if isinstance(position, int):
        return mx.array([[position + row] for row in range(n_rows)], mx.uint32)
    return position.astype(mx.uint32) + mx.arange(n_rows, dtype=mx.uint32)[:, None]


@_fused
def _tempered(scores: mx.array, best: mx.array, per_temperature: mx.array) -> mx.array:
    """Scores over temperature with the best at 0, so that no temperature overflows."""
    return (scores - best) * per_temperature


@_fused
def _checked(best: mx.array, ids: mx.array) -> mx.array:
    """ids as int32, -1 where the best score is NaN (some score was) or infinite (all masked)."""
    return mx.where(mx.abs(best) < math.inf, ids.astype(mx.int32), -1)


@_fused
def _penalised(
    scores: mx.array,
    counts: mx.array,
    is_prompt: mx.array,
    repetition: mx.array,
    presence: mx.array,
    frequency: mx.array,
) -> mx.array:
    """Apply the three penalties; a penalty at its neutral value changes no bit.

    scores      (..., m) float32
    counts      (..., m) float32  times the id is in the reply
    is_prompt   (..., m) bool     the id is in the prompt
    repetition, presence, frequency  () float32
    """
    is_reply = counts > 0
    repeated = mx.where(scores > 0, scores / repetition, scores * repetition)
    scores = mx.where(mx.logical_or(is_prompt, is_reply), repeated, scores)
    return scores - is_reply.astype(mx.float32) * presence - counts * frequency


class _Penalties:
    """Repetition over prompt and reply, presence and frequency over the reply."""

    def __init__(self, sampling: Sampling, vocab_size: int, prompt_ids: Sequence[int]) -> None:
        self.start = mx.zeros(vocab_size, mx.float32)
        is_prompt = mx.zeros(vocab_size, mx.bool_)
        seen = [i for i in set(prompt_ids) if 0 <= i < vocab_size]
        if seen and sampling.repetition_penalty != 1:
            is_prompt[mx.array(seen, mx.int32)] = True
        self._is_prompt = is_prompt
        self._strengths = tuple(
            mx.array(strength, mx.float32)
            for strength in (
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
        )

    def apply(self, scores: mx.array, counts: mx.array, draft_ids: mx.array | None) -> mx.array:
        """scores (R, V), counts (V,), draft_ids (R-1,) or None → (R, V); row j sees draft_ids[:j].

        Rows differ from `counts` at the drafted ids only, so those columns are worked out again
        and written over the rest: K columns a row instead of a count of the vocabulary for each.
        """
        penalised = _penalised(scores, counts, self._is_prompt, *self._strengths)
        n_rows = scores.shape[0]
        if draft_ids is None or n_rows == 1:
            return penalised
        is_before = mx.arange(n_rows)[:, None] > mx.arange(n_rows - 1)
        is_same = draft_ids[:, None] == draft_ids
        repeats = is_before.astype(mx.float32) @ is_same.astype(mx.float32)
        columns = mx.broadcast_to(draft_ids, repeats.shape)
        drafted = _penalised(
            mx.take_along_axis(scores, columns, axis=-1),
            counts[draft_ids] + repeats,
            self._is_prompt[draft_ids],
            *self._strengths,
        )
        return mx.put_along_axis(penalised, columns, drafted, axis=-1)


def _offsets(sampling: Sampling, vocab_size: int) -> mx.array | None:
    """(V,) float32 to add to every row: -inf for suppressed ids, the bias for biased ones."""
    bias = {i: b for i, b in sampling.logit_bias.items() if 0 <= i < vocab_size}
    bias |= {i: -math.inf for i in sampling.suppress_ids if 0 <= i < vocab_size}
    if not bias:
        return None
    offsets = mx.zeros(vocab_size, mx.float32)
    offsets[mx.array(list(bias), mx.int32)] = mx.array(list(bias.values()), mx.float32)
    return offsets


class Sampler:
    """Chooses ids for one reply; built once per request, pure functions of their arguments after.

    start       penalty state before the first reply id; states are immutable, so going back to an
                older one is how a rejected draft is forgotten
    is_greedy   temperature 0: no noise anywhere
    n_logprobs  rivals to report beside each chosen id; None: no logprobs are wanted

    Ids outside the vocabulary (prompt, bias, suppressed) are ignored here; the request was checked
    before. Shapes below: R rows of one pass, V ids, m candidates of a drafter.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocab_size: int,
        prompt_ids: Sequence[int],
        *,
        choice: int = 0,
    ) -> None:
        self.is_greedy = sampling.temperature == 0
        self.vocab_size = vocab_size
        self.n_logprobs = sampling.logprobs
        self._top_k = sampling.top_k
        # 0 would drop even the best id; any smaller share than one id's keeps just that.
        self._top_p = max(sampling.top_p, 1e-9)
        self._log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else None
        self._offsets = _offsets(sampling, vocab_size)
        has_penalty = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        )
        self._penalties = _Penalties(sampling, vocab_size, prompt_ids) if has_penalty else None
        self.start: SamplerState = self._penalties.start if self._penalties else None
        if not self.is_greedy:
            seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed
            self._keys = dict(zip(STREAMS, stream_keys(seed, choice), strict=True))
            self._per_temperature = mx.array(1 / sampling.temperature, mx.float32)
            self._all_ids = mx.arange(vocab_size, dtype=mx.uint32)

    @property
    def is_argmax(self) -> bool:
        """Whether `pick` is the argmax of the raw logits, bar the check that they are sound."""
        return self.is_greedy and self._offsets is None and self._penalties is None

    def advance(self, state: SamplerState, ids: mx.array | Sequence[int]) -> SamplerState:
        """The state after `ids` (n,) int32, possibly lazy, joined the reply; `state` stays."""
        if state is None:
            return None
        if not isinstance(ids, mx.array):
            if not ids:
                return state
            ids = mx.array(list(ids), mx.int32)
        return state.at[ids].add(1.0)

    def pick(
        self,
        logits: mx.array,
        state: SamplerState,
        draft_ids: mx.array | None,
        position: int | mx.array,
        mask: mx.array | None = None,
    ) -> mx.array:
        """Choose the id of each row of a target pass.

        logits     (R, V)  raw
        draft_ids  (R-1,) int32  row j follows draft_ids[:j]; None when R is 1
        position   of row 0's id, counted from the first id of the reply; row j is at position + j
        mask       (R, V) bool  ids the grammar allows; None allows all

        Returns (R,) int32, -1 where a row has a NaN or nothing left to choose.
        """
        scores = self._processed(logits, state, draft_ids, mask)
        best = mx.max(scores, axis=-1)
        if self.is_greedy:
            return _checked(best, mx.argmax(scores, axis=-1))
        scores = _tempered(scores, best[:, None], self._per_temperature)
        scores, columns = self._truncated(scores, self._top_p)
        ids = self._all_ids if columns is None else columns
        chosen = self._argmax_noisy(scores, ids, "choose", _row_positions(position, len(logits)))
        return _checked(best, chosen)

    def distribution(
        self,
        logits: mx.array,
        state: SamplerState,
        draft_ids: mx.array | None,
        mask: mx.array | None = None,
    ) -> mx.array:
        """(R, V) float32: the law of each row's pick; one-hot when greedy, NaN if unusable."""
        scores = self._processed(logits, state, draft_ids, mask)
        if self.is_greedy:
            return self._one_hot(mx.argmax(scores, axis=-1, keepdims=True), mx.max(scores, axis=-1))
        best = mx.max(scores, axis=-1, keepdims=True)
        scores = _tempered(scores, best, self._per_temperature)
        return self._dense(*self._truncated(scores, self._top_p))

    def pick_draft(
        self, logits: mx.array, ids: mx.array | None, position: int | mx.array
    ) -> mx.array:
        """Propose the id the target will likely pick at `position`: same noise, cheap processors.

        logits  (m,) or (1, m)  a drafter's
        ids     (m,) int32      the candidates' ids; None when m is V

        Penalties, grammar and top-p are left out: they cost more than the acceptance they save.
        Returns () int32; some candidate even when all are NaN or suppressed, for pick to refuse.
        """
        scores = self._draft_processed(logits, ids)
        if self.is_greedy:
            column = mx.argmax(scores)
            return (column if ids is None else ids[column]).astype(mx.int32)
        scores, columns = self._draft_truncated(scores)
        if ids is None:
            ids = self._all_ids
        if columns is not None:
            ids = ids[columns]
        positions = _row_positions(position, 1)
        return self._argmax_noisy(scores, ids, "choose", positions).astype(mx.int32)[0]

    def draft_distribution(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        """(V,) float32: a drafter's law after the cheap processors, from which `draw` proposes.

        logits (m,) or (1, m), ids (m,) or None as in pick_draft; one-hot when greedy.
        """
        scores = self._draft_processed(logits, ids)
        if self.is_greedy:
            column = mx.argmax(scores, axis=-1, keepdims=True)
            return self._scattered(column if ids is None else ids[column], mx.ones((1, 1)))[0]
        scores, columns = self._draft_truncated(scores)
        if ids is not None:
            columns = ids[None] if columns is None else ids[columns]
        return self._dense(scores, columns)[0]

    def draw(self, probs: mx.array, stream: Stream, position: int | mx.array) -> mx.array:
        """Draw from probs (V,) with the stream's own noise → () int32; -1 if NaN or all zero.

        When greedy the likeliest id, without noise: the standard rule then keeps what is equal.
        """
        scores = mx.log(probs)[None]
        best = mx.max(scores, axis=-1)
        if self.is_greedy:
            return _checked(best, mx.argmax(scores, axis=-1))[0]
        positions = _row_positions(position, 1)
        return _checked(best, self._argmax_noisy(scores, self._all_ids, stream, positions))[0]

    def uniforms(self, count: int, position: int | mx.array) -> mx.array:
        """(count,) float32 in [0, 1) for the accept tests of the ids from `position` on."""
        if self.is_greedy:
            return mx.zeros(count)
        positions = _row_positions(position, count)[:, 0]
        bits = mixed(self._keys["accept"], positions)[:, 0]
        return (bits >> 8).astype(mx.float32) * 2.0**-24

    def logprobs(self, logits: mx.array, ids: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Log-probabilities under the raw target: before any processor, whatever the temperature.

        logits (R, V) raw, ids (R,) int32 the chosen ones

        Returns float32 chosen (R,), int32 top ids (R, t) best first, float32 their values (R, t);
        t = sampling.logprobs, possibly 0. Finite: minus infinity is written LEAST_LOGPROB.
        """
        logits = logits.astype(mx.float32)
        total = mx.logsumexp(logits, axis=-1, keepdims=True)

        def values(columns: mx.array) -> mx.array:
            picked = mx.take_along_axis(logits, columns, axis=-1)
            return mx.maximum(picked - total, LEAST_LOGPROB)

        chosen = values(ids[:, None])[:, 0]
        n_top = min(self.n_logprobs or 0, logits.shape[-1])
        if n_top == 0:
            return chosen, mx.zeros((len(ids), 0), mx.int32), mx.zeros((len(ids), 0))
        top_ids = mx.argpartition(logits, -n_top, axis=-1)[:, -n_top:]
        top = values(top_ids)
        order = mx.argsort(-top, axis=-1)
        top_ids = mx.take_along_axis(top_ids, order, axis=-1).astype(mx.int32)
        return chosen, top_ids, mx.take_along_axis(top, order, axis=-1)

    def _processed(
        self,
        logits: mx.array,
        state: SamplerState,
        draft_ids: mx.array | None,
        mask: mx.array | None,
    ) -> mx.array:
        """(R, V) scores after suppression, bias, penalties and grammar, before temperature."""
        is_changed = self._offsets is not None or state is not None or not self.is_greedy
        scores = logits.astype(mx.float32) if is_changed else logits
        if self._offsets is not None:
            scores = scores + self._offsets
        if self._penalties is not None and state is not None:
            scores = self._penalties.apply(scores, state, draft_ids)
        if mask is not None:
            scores = mx.where(mask, scores, -math.inf)
        return scores

    def _draft_processed(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        """(1, m) scores of a drafter after suppression and bias."""
        scores = logits.reshape(1, -1)
        if self._offsets is None:
            return scores
        return scores + (self._offsets if ids is None else self._offsets[ids])

    def _draft_truncated(self, scores: mx.array) -> tuple[mx.array, mx.array | None]:
        scores = scores.astype(mx.float32)
        best = mx.max(scores, axis=-1, keepdims=True)
        return self._truncated(_tempered(scores, best, self._per_temperature), top_p=1)

    def _truncated(self, scores: mx.array, top_p: float) -> tuple[mx.array, mx.array | None]:
        """Apply top-k, top-p and min-p to tempered scores whose best is 0.

        scores (R, m)

        Returns scores (R, c), -inf where dropped, and their columns (R, c); None: all m in order.
        """
        columns = None
        if 0 < self._top_k < scores.shape[-1]:
            columns = mx.argpartition(scores, -self._top_k, axis=-1)[..., -self._top_k :]
            scores = mx.take_along_axis(scores, columns, axis=-1)
        if top_p < 1:
            order = mx.argsort(-scores, axis=-1)
            scores = mx.take_along_axis(scores, order, axis=-1)
            columns = order if columns is None else mx.take_along_axis(columns, order, axis=-1)
            mass_above = mx.cumsum(mx.softmax(scores, axis=-1), axis=-1, inclusive=False)
            scores = mx.where(mass_above < top_p, scores, -math.inf)
        if self._log_min_p is not None:
            scores = mx.where(scores >= self._log_min_p, scores, -math.inf)
        return scores, columns

    def _argmax_noisy(
        self, scores: mx.array, ids: mx.array, stream: Stream, positions: mx.array
    ) -> mx.array:
        """scores (R, c), ids (c,) or (R, c), positions (R, 1) → (R,) the ids that win."""
        column = mx.argmax(scores + noise(self._keys[stream], positions, ids), axis=-1)
        if ids is self._all_ids:
            return column
        if ids.ndim == 1:
            return ids[column]
        return mx.take_along_axis(ids, column[:, None], axis=-1)[:, 0]

    def _dense(self, scores: mx.array, columns: mx.array | None) -> mx.array:
        probs = mx.softmax(scores, axis=-1)
        return probs if columns is None else self._scattered(columns, probs)

    def _one_hot(self, ids: mx.array, best: mx.array) -> mx.array:
        ones = mx.where(mx.abs(best) < math.inf, 1.0, math.nan)[:, None]
        return self._scattered(ids, ones)

    def _scattered(self, ids: mx.array, probs: mx.array) -> mx.array:
        """(R, V) zeros with probs (R, c) at ids (R, c)."""
        empty = mx.zeros((len(probs), self.vocab_size))
        return mx.put_along_axis(empty, ids, probs, axis=-1)
