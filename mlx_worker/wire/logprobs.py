"""Log-probabilities of written ids → the two shapes in which the OpenAI API has them.

Owns how the bytes of an id become text: what is no whole character reads as U+FFFD, beside the
exact bytes. Pure; any thread.
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_worker.records import TokenLogprob


@dataclass(frozen=True)
class Scored:
    """One id of a choice as a client sees it.

    rivals  (bytes, logprob) of the likeliest ids, best first; the chosen id may be among them
    offset  characters of the choice that were complete before it
    """

    token: bytes
    logprob: float
    rivals: tuple[tuple[bytes, float], ...]
    offset: int


class Scorer:
    """Follows one choice's ids, to know where in the text each begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_chars = 0

    def read(self, logprobs: Sequence[TokenLogprob], tokens: Mapping[int, bytes]) -> list[Scored]:
        """The next ids, in order; tokens has the bytes of each id that they name."""
        return [self._scored(logprob, tokens) for logprob in logprobs]

    def _scored(self, logprob: TokenLogprob, tokens: Mapping[int, bytes]) -> Scored:
        token, offset = tokens[logprob.id], self._n_chars
        self._n_chars += len(self._decoder.decode(token))
        rivals = tuple((tokens[id], value) for id, value in logprob.top)
        return Scored(token, logprob.logprob, rivals, offset)


def chat_logprobs(scored: Sequence[Scored]) -> dict[str, Any]:
    return {
        "content": [
            _entry(one.token, one.logprob)
            | {"top_logprobs": [_entry(token, logprob) for token, logprob in one.rivals]}
            for one in scored
        ]
    }


def completion_logprobs(scored: Sequence[Scored]) -> dict[str, Any]:
    """Parallel lists. The chosen id is always in top_logprobs, beside its rivals."""
    return {
        "tokens": [token_text(one.token) for one in scored],
        "token_logprobs": [one.logprob for one in scored],
        "top_logprobs": [_by_text(one) for one in scored],
        "text_offset": [one.offset for one in scored],
    }


def token_text(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def _entry(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": logprob, "bytes": list(token)}


def _by_text(one: Scored) -> dict[str, float]:
    """Of ids that read alike, such as two halves of characters, the likelier one is shown."""
    found: dict[str, float] = {}
    for token, logprob in (*one.rivals, (one.token, one.logprob)):
        found.setdefault(token_text(token), logprob)
    return found
