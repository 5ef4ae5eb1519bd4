"""Gemma's replies drawn at random, each with what it means; and what a parser makes of a reply."""

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_worker.records import TextProtocol, Tools
from mlx_worker.wire.parser import reply_parser
from mlx_worker.wire.parts import CallArguments, CallOpened, Content, Part, Reasoning

QUOTE = '<|"|>'
OTHERS = ("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_response>", "<tool_response|>")
GEMMA = TextProtocol(
    family="gemma4",
    thinking=("<|channel>", "<channel|>"),
    call=("<|tool_call>", "<tool_call|>"),
    others=(*OTHERS, "<|think|>", QUOTE),
)
MARKERS = (*GEMMA.thinking, *GEMMA.call, *GEMMA.others)  # type: ignore[misc]
HARMLESS = ("<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|think|>", "<tool_response|>")
SPELLED = re.compile("|".join(map(re.escape, sorted(MARKERS, key=len, reverse=True))))
NAMES = ("f", "get_time", "get", "pay-later", "a.b")


def tools(*names: str) -> Tools:
    return Tools(tuple({"type": "function", "function": {"name": name}} for name in names))


TOOLS = tools(*NAMES)


@dataclass
class Read:
    """What a parser told of one reply: joined content and thinking, calls with their JSON."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def read(parts: Iterable[Part]) -> Read:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallOpened(index, name):
                assert index == len(calls)
                calls.append((name, []))
            case CallArguments(index, piece):
                assert index == len(calls) - 1
                calls[index][1].append(piece)
    arguments = [(name, "".join(pieces)) for name, pieces in calls]
    return Read("".join(content), "".join(reasoning), arguments)


def parsed(
    text: str,
    *,
    cuts: Sequence[int] = (),
    marks: Sequence[int] | None = None,
    opening: str = "",
    offered: Tools | None = TOOLS,
    protocol: TextProtocol = GEMMA,
) -> Read:
    """A reply that is pushed in pieces.

    cuts   where it is cut, ascending
    marks  of the whole text; None: all that is spelled
    """
    parser = reply_parser(protocol, opening, offered)
    parts: list[Part] = []
    start = 0
    for end in (*cuts, len(text)):
        inside = None
        if marks is not None:
            inside = [mark - start for mark in marks if start <= mark < end]
        parts += parser.push(text[start:end], inside)
        start = end
    return read(parts + parser.finish())


@dataclass
class Reply:
    """A reply and what it means.

    marks     where its markers are, whatever its text may spell beside them
    cuts      where it may be cut without cutting a marker
    meaning   content, thinking, and the calls' arguments as values; None: it is garbage
    """

    text: str
    marks: list[int]
    cuts: list[int]
    opening: str = ""
    meaning: tuple[str, str, list[tuple[str, Any]]] | None = None


class Writer:
    """Writes one random reply. spells: its texts hold control tokens' letters, too."""

    def __init__(self, random: random.Random, spells: bool) -> None:
        self.random = random
        self.spells = spells
        self.pieces: list[tuple[bool, str]] = []
        self.segments = [""]  # of content, between calls
        self.thoughts: list[str] = []
        self.calls: list[tuple[str, Any]] = []
        self.is_after_thinking = False

    def reply(self) -> Reply:
        opening = self.maybe_opened()
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 3))):
            self.random.choices((self.say, self.call, self.think, self.noise), (3, 4, 1, 1))[0]()
        end = self.random.random()
        if end < 0.1:
            self.think(is_closed=False)
        elif end < 0.3:
            self.answer(is_closed=False)
        return self.written(opening)

    def written(self, opening: str) -> Reply:
        marks: list[int] = []
        cuts: list[int] = []
        at = 0
        for is_marker, text in self.pieces:
            if is_marker:
                marks.append(at)
            else:
                cuts += range(at + 1, at + len(text))
            at += len(text)
            cuts.append(at)
        text = "".join(text for _, text in self.pieces)
        inside = [cut for cut in cuts if cut < len(text)]
        return Reply(text, marks, inside, opening, self.meaning())

    def meaning(self) -> tuple[str, str, list[tuple[str, Any]]]:
        if not self.calls:
            content = "".join(self.segments)
        else:
            content = "".join(part for part in self.segments if part.strip()).rstrip()
        return content, "\n".join(self.thoughts), self.calls

    # What a reply is made of

    def maybe_opened(self) -> str:
        """The prompt may have opened a channel, or closed an empty one."""
        kind = self.random.random()
        if kind < 0.1:
            self.body_of_thought(is_closed=True)
            return "<|channel>thought\n"
        if kind < 0.15:
            self.is_after_thinking = True
            return "<|channel>thought\n<channel|>"
        return ""

    def think(self, is_closed: bool = True) -> None:
        self.mark("<|channel>")
        self.put(self.random.choice(("thought\n", "thought\n", "analysis\n", "\n", "")))
        self.body_of_thought(is_closed)

    def body_of_thought(self, is_closed: bool) -> None:
        thought = "\n".join(self.words() + "." for _ in range(self.random.choice((0, 1, 1, 2))))
        self.put(thought)
        self.thoughts += [thought] if thought else []
        self.put("\n" * self.random.choice((0, 1, 1, 2)))
        if is_closed:
            self.mark("<channel|>")
            self.is_after_thinking = True

    def say(self) -> None:
        before, after = self.space(), self.space()
        text = before + (self.words() + after if self.random.random() < 0.8 else "")
        self.put(text)
        if self.is_after_thinking:
            text = text.lstrip("\n")
            self.is_after_thinking = not text
        self.segments[-1] += text

    def noise(self) -> None:
        """Control tokens that no client is shown."""
        self.mark(self.random.choice(("<turn|>", "<|turn>", "<|think|>", "<channel|>", QUOTE)))

    def answer(self, is_closed: bool = True) -> None:
        """The model goes on as if it were the tool."""
        self.mark("<|tool_response>")
        self.put(f"response:f{{a:{self.random.randrange(9)}}} ")
        if is_closed:
            self.mark("<tool_response|>")

    def call(self) -> None:
        """One or several calls."""
        is_bare = self.random.random() < 0.3 and not self.segments[-1].strip()
        if not is_bare:
            self.mark("<|tool_call>")
        for n in range(self.random.choice((1, 1, 1, 2))):
            self.put(self.space() if is_bare or n else "")
            self.one_call(is_bare)
        if not is_bare:
            self.random.choices((lambda: self.mark("<tool_call|>"), self.answer), (9, 1))[0]()

    def one_call(self, is_bare: bool) -> None:
        name = self.random.choice(NAMES if is_bare else (*NAMES, "unknown"))
        self.put("call:" + name)
        self.segments.append("")
        self.is_after_thinking = False
        self.calls.append((name, self.entries(depth=0)))

    # Values, each written as it is drawn

    def value(self, depth: int) -> Any:
        kinds = (self.string, self.string, self.scalar, self.bare_word)
        nested = (self.entries, self.items)
        if depth < 3 and self.random.random() < 0.3:
            return self.random.choice(nested)(depth)
        return self.random.choice(kinds)()

    def entries(self, depth: int) -> dict[str, Any]:
        keys = self.random.sample(
            ("a", "b_c", "n 1", "é", "call"), self.random.choice((0, 1, 1, 2))
        )
        found: dict[str, Any] = {}
        self.put("{")
        for n, key in enumerate(keys):
            self.put("," + self.gap() if n else self.gap())
            self.key(key)
            self.put(":" + self.gap())
            found[key] = self.value(depth + 1)
            self.put(self.gap())
        self.put("}")
        return found

    def items(self, depth: int) -> list[Any]:
        found: list[Any] = []
        self.put("[")
        for n in range(self.random.choice((0, 1, 2))):
            self.put("," + self.gap() if n else self.gap())
            found.append(self.value(depth + 1))
            self.put(self.gap())
        self.put("]")
        return found

    def key(self, key: str) -> None:
        style = self.random.random()
        if style < 0.7:
            self.put(key)
        elif style < 0.85:
            self.put(json.dumps(key))
        else:
            self.mark(QUOTE)
            self.put(key)
            self.mark(QUOTE)

    def string(self) -> str:
        if self.random.random() < 0.2:
            return self.json_string()
        self.mark(QUOTE)
        text = "".join(self.fragment() for _ in range(self.random.choice((0, 1, 2, 3))))
        self.mark(QUOTE)
        return text

    def json_string(self) -> str:
        text = "".join(self.random.choice(self.HARD) for _ in range(self.random.choice((0, 1, 2))))
        self.put(json.dumps(text, ensure_ascii=self.random.random() < 0.5))
        return text

    HARD = (
        "{",
        "}",
        '"',
        "\n",
        "call:f{}",
        "\\",
        "é",
        "🐋",
        "]",
        ",",
        ":",
        "x y",
        "<|",
        "\\u00",
        "\t",
    )

    def fragment(self) -> str:
        """A piece of a string; control tokens in it are only letters."""
        if self.random.random() < 0.2:
            return self.marker_in_string()
        text = self.random.choice(self.HARD)
        self.put(text)
        return text

    def marker_in_string(self) -> str:
        """Without ids only those that have nothing to do with calls may stand in a string."""
        text = self.random.choice(MARKERS if self.spells else HARMLESS)
        if self.spells:
            self.put(text)
        else:
            self.mark(text)
        return text

    def scalar(self) -> Any:
        value = self.random.choice((True, False, None, 0, -7, 12, 3.5, -0.25, 1e-7, 10**20))
        self.put(json.dumps(value))
        return value

    def bare_word(self) -> str:
        word = self.random.choice(("blue", "New York", "a:b", "007", "NaN", "x-1", "it's", "日本"))
        self.put(word)
        return word

    # Text

    def words(self) -> str:
        known = (
            "Hello",
            "a < b",
            "日本",
            "call:",
            "{x}",
            "it's",
            "call:nobody{}",
            "🐋",
            "<|",
            "e\u0301",
        )
        spelled = ("<|tool_call>call:f{}<tool_call|>", "<|channel>", QUOTE, "<turn|>")
        chosen = [self.random.choice(known) for _ in range(self.random.choice((1, 2)))]
        if self.spells and self.random.random() < 0.3:
            chosen.append(self.random.choice(spelled))
        return "So " + " ".join(chosen)

    def space(self) -> str:
        return self.random.choice(("", "", "", " ", "\n", "\n\n", " \n"))

    def gap(self) -> str:
        return self.random.choice(("", "", "", " ", "\n"))

    def put(self, text: str) -> None:
        if text:
            self.pieces.append((False, text))

    def mark(self, marker: str) -> None:
        self.pieces.append((True, marker))


GARBAGE = (
    *MARKERS, *MARKERS, "<|tool_call>", "<|tool_call>call:f{", "call:f{", "call:", "call:g{", "{",
    "}", "[", "]", ":", ",", '"', "\\", "\\u12", "a", "b c", "-1.5e3", ".", "007", "true", "\n",
    " ", "<|", "<", "|>", "thought\n", "日", "\u2028", "\x00",
)  # fmt: skip


def garbage(random: random.Random) -> Reply:
    """Anything; what it means nobody knows."""
    text = "".join(random.choice(GARBAGE) for _ in range(random.randrange(1, 12)))
    marks = [found.start() for found in SPELLED.finditer(text)]
    opening = random.choice(("", "", "<|channel>thought\n", "<|channel>"))
    return Reply(text, marks, list(range(1, len(text))), opening)


def spelled_reply(random: random.Random) -> Reply:
    """One whose markers are wherever one is spelled."""
    if random.random() < 0.2:
        return garbage(random)
    while True:
        reply = Writer(random, spells=False).reply()
        if [found.start() for found in SPELLED.finditer(reply.text)] == reply.marks:
            return reply


def marked_reply(random: random.Random) -> Reply:
    """One whose markers are ids, and whose text spells others."""
    return Writer(random, spells=True).reply()
