"""Messages → prompt ids, through the model's own chat template.

Owns that text a client wrote stays text: what looks like a control token in it is cut in two for
the template and for the tokenizer, so that nobody can open or close a turn from inside one. Any
thread; no arrays.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_worker.engine.room import Room
from mlx_worker.errors import InvalidParameter, RequestError

NONCHARACTER = "\ufdd0"  # Unicode keeps it free for a program's own use
CLIENT_OPTIONS = ("tools", "documents")  # template options that hold a client's text


class ChatEncoder:
    """Encodes messages for one tokenizer; built once, because it indexes the control tokens.

    room  of the model, beyond which nothing is encoded; None: no end
    """

    def __init__(self, tokenizer: TokenizerWrapper, room: Room | None = None) -> None:
        self._tokenizer = tokenizer
        self._room = room
        tokens = _control_tokens(tokenizer)
        # The template finds past thinking by its markers, so these must reach it whole.
        thinking = f"{tokenizer.think_start} {tokenizer.think_end}"
        kept = [re.escape(token) for token in tokens if token in thinking]
        self._thinking = re.compile(f"({'|'.join(kept)})") if kept else None
        self._cutter = TokenCutter(tokens)

    def encode(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[int, ...]:
        """Prompt ids with the reply's turn opened; options (tools, …) are the template's.

        Raises RequestError where the template refuses the messages, or there is none;
        ContextTooLong where they can't fit.
        """
        if self._room:
            self._room.check_count(messages)
            for message in messages:
                if isinstance(text := message.get("content"), str):
                    self._room.check_text(text.strip())  # templates drop blanks at its ends
        options.setdefault("enable_thinking", False)
        mark = _unused_mark([messages, options])
        safe = [self._safe(message, mark) for message in messages]
        for name in CLIENT_OPTIONS:
            if name in options:
                options[name] = self._cutter.cut(options[name], mark)
        text = self._rendered(safe, options)
        if self._room:
            self._room.check_text(text)
        return tuple(self._joined(text.split(mark), mark))

    def _joined(self, pieces: Sequence[str], mark: str) -> list[int]:
        first, *rest = pieces
        ids = self._ids(first)
        for piece in rest:
            ids += self._ids_after(mark, piece)
            if self._room:
                self._room.check_count(ids)
        return ids

    def _safe(self, message: Mapping[str, Any], mark: str) -> Any:
        safe = self._cutter.cut(message, mark)
        content = message.get("content")
        if message.get("role") in ("assistant", "model") and isinstance(content, str):
            safe["content"] = self._safe_reply(content, mark)
        return safe

    def _safe_reply(self, text: str, mark: str) -> str:
        """Past thinking keeps its markers. What the template joins, once it took them out, must be
        no token either, so all else is cut wherever one could begin."""
        pieces = self._thinking.split(text) if self._thinking else [text]
        if len(pieces) == 1:
            return self._cutter.cut(text, mark)
        pieces[::2] = [self._cutter.cut_starts(piece, mark) for piece in pieces[::2]]
        return "".join(pieces)

    def _rendered(self, messages: list[Any], options: Mapping[str, Any]) -> str:
        if not self._tokenizer.has_chat_template:
            raise RequestError("this model has no chat template", hint="send a plain prompt")
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:  # whatever a template's code raises is about these messages
            what = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(f"the model's chat template: {what}", param="messages") from error

    def _ids(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        except (TypeError, UnicodeError) as error:  # half a surrogate pair, as "\ud800" in JSON
            raise InvalidParameter("messages", text, "text that UTF-8 can write") from error

    def _ids_after(self, mark: str, text: str) -> list[int]:
        """The ids of text that continues other text: some tokenizers put a space before a start."""
        before, both = self._ids(mark), self._ids(mark + text)
        if both[: len(before)] == before:
            return both[len(before) :]
        return self._ids(text)


class TokenCutter:
    """Cuts given tokens in two wherever they occur in text."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokens = frozenset(tokens)
        self._lengths = sorted({len(token) for token in tokens})
        starts = "".join(sorted({token[0] for token in tokens}))
        self._starts = re.compile(f"[{re.escape(starts)}]") if starts else None

    def cut(self, value: Any, mark: str) -> Any:
        """The value with `mark` after the first character of every token in its texts."""
        if isinstance(value, str):
            return self._cut_text(value, mark)
        if isinstance(value, Mapping):
            return {self.cut(key, mark): self.cut(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.cut(item, mark) for item in value]
        return value

    def cut_starts(self, text: str, mark: str) -> str:
        """The text with `mark` after every character that a token could begin with."""
        return self._starts.sub(lambda start: start[0] + mark, text) if self._starts else text

    def _cut_text(self, text: str, mark: str) -> str:
        if self._starts is None:
            return text
        pieces, done = [], 0
        for match in self._starts.finditer(text):
            at = match.start()
            if any(text[at : at + n] in self._tokens for n in self._lengths):
                pieces += [text[done : at + 1], mark]
                done = at + 1
        return "".join([*pieces, text[done:]])


def _control_tokens(tokenizer: TokenizerWrapper) -> list[str]:
    """Added tokens that mean something: marked special, or written by the template.

    Others, such as runs of newlines in some vocabularies, are ordinary text with an id of its own.
    """
    added = tokenizer.added_tokens_decoder.values()
    template = str(tokenizer.chat_template or "")
    texts = {token.content for token in added if token.special or token.content in template}
    return sorted(text for text in texts if len(text) > 1 and not text.isspace())


def _unused_mark(value: Any) -> str:
    """A text of noncharacters that occurs nowhere in the value."""
    longest = max((_longest_run(text) for text in _texts(value)), default=0)
    return NONCHARACTER * (longest + 1)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall(f"{NONCHARACTER}+", text)), default=0)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
