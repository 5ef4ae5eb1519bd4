"""Gemma 4's replies → parts.

Its thinking is `<|channel>thought\\n…\\n<channel|>`, a call `<|tool_call>call:name{…}<tool_call|>`.
Owns where a channel's header and a call's name end, and calls that come without their markers.
Leaves arguments to gemma_arguments.py and white space to channels.py. Pure; any thread.

What a marker ends, it ends whole: a call of which a part is missing becomes one that JSON can read.
Only where the reply is cut off inside a call its arguments stay as they are.
"""

import re

from mlx_worker.records import TextProtocol, Tools
from mlx_worker.wire.channels import ChannelReader, Mode
from mlx_worker.wire.gemma_arguments import QUOTE, Arguments

RESPONSE = "<|tool_response>"  # what a tool answers; a model that writes one itself is not heard
HEADER = re.compile(r"[\w-]{0,32}")
THOUGHT = "thought"
HEAD = re.compile(r"call:\s{0,8}([\w.:/-]{1,256})\s{0,8}")  # that are still without a brace
HEAD_AND_BRACE = re.compile(HEAD.pattern + r"\{")
HEAD_BEGUN = re.compile(r"c(?:a(?:l(?:l(?::\s{0,8}(?:[\w.:/-]{1,256}\s{0,8})?)?)?)?)?")
MAX_HEAD = 280  # letters; more than HEAD can have
SPACE = re.compile(r"\s*")
BETWEEN_CALLS = re.compile(r"[\s,;)}\]]*")


class GemmaReader(ChannelReader):
    """A ReplyParser for Gemma 4."""

    def __init__(self, protocol: TextProtocol, tools: Tools | None) -> None:
        super().__init__(protocol, tools, (QUOTE, RESPONSE))
        # A strict tool's call is held to its schema from its marker on; without one it is none.
        loose = [tool["function"] for tool in tools.offered] if tools else []
        loose = [function["name"] for function in loose if not function.get("strict")]
        self._bare_heads = [f"call:{name}{{" for name in loose]
        self._max_bare_head = max(map(len, self._bare_heads), default=0)
        self._may_call = bool(self._bare_heads)  # a call without markers may begin here
        self._held = ""  # the part of a header or head that has come
        self._has_header = False  # of the channel that is open
        self._arguments: Arguments | None = None  # of the call that is open
        self._has_called = False  # between these call markers
        self._is_bare = False  # the call has no markers

    def _read_marker(self, marker: str) -> None:
        if self._mode == "call" and self._keeps(marker):
            return
        if self._mode in ("call", "ignored") and marker != QUOTE:
            self._enter("content")
        if marker == RESPONSE:
            self._enter("ignored")
        else:
            super()._read_marker(marker)

    def _keeps(self, marker: str) -> bool:
        """Arguments keep quotes, and their strings all that has nothing to do with calls."""
        ends_call = marker in (*self._call, RESPONSE)
        if ends_call or not self._arguments or not self._arguments.mark(marker):
            return False
        self._told.argue(self._arguments.take())
        return True

    def _read_content(self, text: str, at: int) -> int:
        """Looks for a call without markers where one may begin."""
        if not self._may_call:
            return super()._read_content(text, at)
        if not self._held and (space := matched(SPACE, text, at)):
            self._told.say(space)
            return at + len(space)
        head = self._held + text[at : at + self._max_bare_head]
        for bare_head in self._bare_heads:
            if head.startswith(bare_head):
                at += len(bare_head) - len(self._held)
                self._held, self._mode, self._is_bare = "", "call", True
                self._open_call(bare_head[len("call:") : -1])
                return at
        if any(bare_head.startswith(head) for bare_head in self._bare_heads):
            self._held = head
            return len(text)
        self._say_held()
        return at

    def _read_thinking(self, text: str, at: int) -> int:
        """A header is one word and a line end."""
        if not self._has_header:
            return super()._read_thinking(text, at)
        header = self._held + text[at : at + MAX_HEAD]
        word = matched(HEADER, header)
        if word == header:
            self._held = header
            return len(text)
        self._has_header = False
        if header[len(word)] == "\n":
            at += len(word) + 1 - len(self._held)
            self._held = ""
        self._think_held()
        return at

    def _read_call(self, text: str, at: int) -> int:
        if self._arguments is None:
            return self._read_head(text, at)
        at = self._arguments.feed(text, at)
        self._told.argue(self._arguments.take())
        if self._arguments.is_closed:
            self._arguments, self._has_called = None, True
            if self._is_bare:
                self._enter("content")
        return at

    def _read_head(self, text: str, at: int) -> int:
        """Between call markers: up to a call's brace. What is no call is content."""
        skipped = matched(BETWEEN_CALLS if self._has_called else SPACE, text, at)
        if not self._held and skipped:
            self._told.say("" if self._has_called else skipped)
            return at + len(skipped)
        head = self._held + text[at : at + MAX_HEAD]
        if found := HEAD_AND_BRACE.match(head):
            at += found.end() - len(self._held)
            self._held = ""
            self._open_call(found[1])
        elif HEAD_BEGUN.fullmatch(head):
            self._held, at = head, len(text)
        else:
            self._mode = "content"
            self._say_held()
        return at

    def _open_call(self, name: str) -> None:
        self._told.open_call(name)
        self._arguments = Arguments()
        self._told.argue(self._arguments.take())
        self._may_call = bool(self._bare_heads)

    def _enter(self, mode: Mode) -> None:
        super()._enter(mode)
        self._has_header, self._has_called, self._is_bare = mode == "thinking", False, False

    def _leave(self) -> None:
        if self._mode == "call":
            self._close_call()
        elif self._mode == "thinking":
            self._close_header()
        elif self._held:
            self._say_held()

    def _close_call(self) -> None:
        if found := HEAD.fullmatch(self._held):
            self._held = ""
            self._open_call(found[1])
        if self._arguments:
            self._arguments.close()
            self._told.argue(self._arguments.take())
            self._arguments = None
        elif self._held:
            self._say_held()

    def _close_header(self) -> None:
        """All of a channel was one word: its header, or a thought."""
        if THOUGHT.startswith(self._held):
            self._held = ""
        self._think_held()

    def _say_held(self) -> None:
        """No call begins before the next one ends."""
        held, self._held, self._may_call = self._held, "", False
        self._told.say(held)

    def _think_held(self) -> None:
        held, self._held = self._held, ""
        self._told.think(held)

    def _cut(self) -> None:
        """A call that never closed stays as it is; without its brace it is nothing."""
        if self._mode != "call":
            self._leave()
        elif not self._is_bare and HEAD_BEGUN.fullmatch(self._held):
            self._held = ""  # the beginning of a call is no content, though no call came of it
        elif self._held:
            self._say_held()


def matched(pattern: re.Pattern[str], text: str, at: int = 0) -> str:
    """What it finds there; it may be nothing."""
    found = pattern.match(text, at)
    return found[0] if found else ""
