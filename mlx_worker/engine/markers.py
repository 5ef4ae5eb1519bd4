"""The control tokens by which a model's reply says what is thinking and what is a tool call.

Owns finding them, by their text and never by number, and following them through a reply id by id.
Leaves what stands between them to wire/, which reads the same markers in the text. No arrays; any
thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_worker.records import TextProtocol

GEMMA4_THINKING = ("<|channel>", "<channel|>")
GEMMA4_CALL = ("<|tool_call>", "<tool_call|>")
# Some are written by the template alone, and not all are marked as special in every tokenizer.
QUOTE, RESPONSE = '<|"|>', "<|tool_response>"
GEMMA4_OTHERS = (
    "<|turn>", "<turn|>", "<|tool>", "<tool|>", RESPONSE, "<tool_response|>", "<|think|>", QUOTE,
)  # fmt: skip

Kind = Literal["content", "thinking", "call", "control"]
Pair = tuple[str, str] | None


def text_protocol(tokenizer: TokenizerWrapper) -> TextProtocol:
    """How replies of this tokenizer's model are marked; of families but Gemma 4, as mlx-lm says."""
    vocabulary = tokenizer.get_vocab()
    special = sorted(
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special
    )
    if all(token in vocabulary for token in (*GEMMA4_THINKING, *GEMMA4_CALL)):
        others = [token for token in GEMMA4_OTHERS if token in vocabulary]
        known = {*GEMMA4_THINKING, *GEMMA4_CALL, *others}
        others += [token for token in special if token not in known]
        return TextProtocol("gemma4", GEMMA4_THINKING, GEMMA4_CALL, tuple(others))
    thinking = _pair(tokenizer.think_start, tokenizer.think_end)
    call = _pair(tokenizer.tool_call_start, tokenizer.tool_call_end)
    markers = {text for pair in (thinking, call) if pair for text in pair if text}
    return TextProtocol(
        family="marked",
        thinking=thinking,
        call=call,
        others=tuple(token for token in special if token not in markers),
        are_ids=all(text in vocabulary for text in markers),
        read_call=tokenizer.tool_parser,
    )


def _pair(opens: str | None, closes: str | None) -> Pair:
    return (opens, closes or "") if opens else None


@dataclass(frozen=True)
class Markers:
    """The ids of a protocol's control tokens; none where they aren't ids of their own.

    texts  id → what it reads as, of every control token
    quote, response  in a call: what delimits its strings; what a tool's answer opens with
    others_end_calls  outside a call's strings every other marker ends it, as in Gemma 4
    """

    texts: dict[int, str]
    think_open: int | None = None
    think_close: int | None = None
    call_open: int | None = None
    call_close: int | None = None
    quote: int | None = None
    response: int | None = None
    others_end_calls: bool = False

    @property
    def without_calls(self) -> "Markers":
        """For replies to which no tool was offered: a call's marker is one like any other."""
        return replace(self, call_open=None, call_close=None)


def markers_of(protocol: TextProtocol, tokenizer: TokenizerWrapper) -> Markers:
    if not protocol.are_ids:
        return Markers({})
    vocabulary = tokenizer.get_vocab()
    thinking, call = protocol.thinking or ("", ""), protocol.call or ("", "")
    every = (*thinking, *call, *protocol.others)
    is_gemma = protocol.family == "gemma4"
    inside = (QUOTE, RESPONSE) if is_gemma else ("", "")
    ids = [vocabulary.get(text) for text in (*thinking, *call, *inside)]
    texts = {vocabulary[text]: text for text in every if text in vocabulary}
    return Markers(texts, *ids, others_end_calls=is_gemma)


def opening(prompt_ids: Sequence[int], markers: Markers) -> tuple[int, ...]:
    """What the prompt's end leaves open: the thinking marker and the ids after it; () for nothing.

    Text of a client holds no control token, so the last one in the prompt is the template's own.
    """
    for at in range(len(prompt_ids) - 1, -1, -1):
        if prompt_ids[at] in markers.texts:
            is_open = prompt_ids[at] == markers.think_open
            return tuple(prompt_ids[at:]) if is_open else ()
    return ()


class Follower:
    """Says of each id of a reply, in order, what it is part of.

    is_thinking, is_calling  where the next id is, should it be no marker; else it is content
    n_thinking  ids that were thinking so far, markers included
    n_calls     tool calls that anything ended
    """

    def __init__(self, markers: Markers, is_thinking: bool = False) -> None:
        self._markers = markers
        self.is_thinking = is_thinking
        self.is_calling = self._is_string = False
        self.n_thinking = self.n_calls = 0

    @property
    def is_content(self) -> bool:
        """Whether the next id is content, should it be no marker."""
        return not self.is_thinking and not self.is_calling

    def kind(self, id: int) -> Kind:
        kind = self._kind(id)
        self.n_thinking += kind == "thinking"
        return kind

    def _kind(self, id: int) -> Kind:
        markers = self._markers
        if id not in markers.texts:
            return "thinking" if self.is_thinking else "call" if self.is_calling else "content"
        if id == markers.call_open:  # in thinking too: a model may forget to close that
            self._end_call()
            self.is_thinking, self.is_calling = False, True
            return "call"
        if self.is_calling and self._is_of_call(id):
            return "call"
        self._end_call()
        if id == markers.think_open:
            self.is_thinking = True
        is_thinking = self.is_thinking
        if id == markers.think_close:
            self.is_thinking = False
        return "thinking" if is_thinking else "control"

    def _is_of_call(self, id: int) -> bool:
        """Whether a marker is part of the call that is open; its end is."""
        markers = self._markers
        if id == markers.call_close:
            self._end_call()
            return True
        if id == markers.quote:
            self._is_string = not self._is_string
            return True
        return id != markers.response and (self._is_string or not markers.others_end_calls)

    def _end_call(self) -> None:
        self.n_calls += self.is_calling
        self.is_calling = self._is_string = False
