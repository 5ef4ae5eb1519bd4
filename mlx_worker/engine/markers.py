"""The control tokens by which a model's reply says what is thinking and what is a tool call.

Owns finding them, by their text and never by number, and following them through a reply id by id.
Leaves what stands between them to wire/, which reads the same markers in the text. No arrays; any
thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_worker.records import TextProtocol

GEMMA4_THINKING = ("<|channel>", "<channel|>")
GEMMA4_CALL = ("<|tool_call>", "<tool_call|>")
# Some are written by the template alone, and not all are marked as special in every tokenizer.
GEMMA4_OTHERS = (
    "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_response>", "<tool_response|>",
    "<|think|>", '<|"|>',
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
    """

    texts: dict[int, str]
    think_open: int | None = None
    think_close: int | None = None
    call_open: int | None = None
    call_close: int | None = None


def markers_of(protocol: TextProtocol, tokenizer: TokenizerWrapper) -> Markers:
    if not protocol.are_ids:
        return Markers({})
    vocabulary = tokenizer.get_vocab()
    thinking, call = protocol.thinking or ("", ""), protocol.call or ("", "")
    every = (*thinking, *call, *protocol.others)
    ids = [vocabulary.get(text) for text in (*thinking, *call)]
    return Markers({vocabulary[text]: text for text in every if text in vocabulary}, *ids)


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
    n_calls     tool calls that were closed
    """

    def __init__(self, markers: Markers, is_thinking: bool = False) -> None:
        self._markers = markers
        self.is_thinking = is_thinking
        self.is_calling = False
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
        if id == markers.think_open or (self.is_thinking and id != markers.think_close):
            self.is_thinking, self.is_calling = True, False
            return "thinking"
        if id == markers.think_close:
            was_thinking, self.is_thinking = self.is_thinking, False
            return "thinking" if was_thinking else "control"
        if id == markers.call_open:
            self.is_calling = True
            return "call"
        if id == markers.call_close:
            self.n_calls += self.is_calling
            self.is_calling = False
            return "call"
        return "call" if self.is_calling else "control"
