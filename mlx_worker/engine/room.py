"""How much text can be a prompt at all, so that what can't is refused before it is tokenized.

Owns that bound alone; whether a prompt of known length fits is session.py's. Any thread.

Tokenizing 16 MiB takes half a minute, and minutes where control tokens are cut out of it; nobody is
served meanwhile, and an engine that is silent for so long counts as stuck. No token is longer than
the longest of the vocabulary, so a text that is longer than the context times that can't fit. (A
tokenizer that drops long runs of blanks could have made it fit; none of that length is worth it.)
"""

from collections.abc import Sequence
from typing import Any

from mlx_worker.errors import ContextTooLong


class Room:
    """What one model can take."""

    def __init__(self, tokenizer: Any, context_limit: int) -> None:
        self._limit = context_limit
        self._longest = max(map(len, tokenizer.get_vocab()))

    def check_text(self, text: str) -> None:
        """Raises ContextTooLong where it can't fit, whatever its ids are."""
        if len(text) > self._limit * self._longest:
            self._refuse(len(text) // self._longest)

    def check_count(self, things: Sequence[Any]) -> None:
        """The same for ids so far, or messages, of which each has an id at least."""
        if len(things) > self._limit:
            self._refuse(len(things))

    def _refuse(self, n_tokens: int) -> None:
        raise ContextTooLong(tokens=n_tokens, limit=self._limit, is_least=True)
