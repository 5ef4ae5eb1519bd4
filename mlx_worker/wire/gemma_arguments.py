"""A call's arguments as Gemma writes them → JSON text, as they come.

Owns the form `{key:<|"|>text<|"|>,n:3,deep:{a:[1,true]}}`, and what becomes of text that isn't
quite that: whatever it is, the pieces join to one JSON object once it is closed. Ordinary JSON is
read too. Leaves to gemma.py where arguments begin and end. Pure; any thread.
"""

import json
import re

QUOTE = '<|"|>'  # a control token: around strings
MAX_DEPTH = 200  # objects and lists inside each other; a reader's recursion must bear it
MAX_NUMBER = 100  # letters; Python reads no integer of more than 4,300
CLOSES = {"{": "}", "[": "]"}
LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null"}
NUMBER = re.compile(r"([+-]?)(0|[1-9][0-9]*)?(?:\.([0-9]*))?([eE][+-]?[0-9]+)?")
SPACE = re.compile(r"\s*")
KEY_END = re.compile(r"[:,{}\[\]\n]")
WORD_END = re.compile(r"[,{}\[\]\n]")
STRING_END = re.compile(r'["\\]')
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
ESCAPE_BEGUN = re.compile(r"\\u[0-9a-fA-F]{0,3}")
encode = json.JSONEncoder(ensure_ascii=False).encode


def escaped(text: str) -> str:
    """As it stands inside a JSON string."""
    return encode(text)[1:-1]


def value(word: str) -> str:
    """A bare word as JSON: a literal, a number, or else a string (`007`, `NaN`, `blue`)."""
    if literal := LITERALS.get(word.lower()):
        return literal
    number = NUMBER.fullmatch(word)
    if not number or not (number[2] or number[3]) or len(word) > MAX_NUMBER:
        return encode(word)
    sign, whole, fraction, exponent = number.groups(default="")
    return f"{sign.strip('+')}{whole or 0}{'.' if fraction else ''}{fraction}{exponent}"


class Arguments:
    """One object, from behind its opening brace.

    Text goes to feed, markers to mark; take gives the JSON so far. What is due next is, in an
    object, a key, a colon, a value or a comma, in a list a value or a comma. What is missing of
    that is written when the next thing comes, so a comma or colon too few or too many does no harm.
    """

    def __init__(self) -> None:
        self._json = ["{"]
        self._closers = ["}"]  # of what is open, the innermost last
        self._due = "key"
        self._quote = ""  # what ends the string that is being read
        self._escape = ""  # the part of its escape that has come
        self._word: list[str] = []  # the bare word that is being read

    @property
    def is_closed(self) -> bool:
        return not self._closers

    def take(self) -> str:
        """The JSON that is new."""
        json, self._json = "".join(self._json), []
        return json

    def feed(self, text: str, at: int) -> int:
        """Read on from there, to the text's end or behind the object's last brace."""
        while at < len(text) and self._closers:
            if self._quote == QUOTE:
                self._json.append(escaped(text[at:]))
                return len(text)
            if self._escape:
                at = self._read_escape(text, at)
            elif self._quote:
                at = self._read_string(text, at)
            elif self._word:
                at = self._read_word(text, at)
            else:
                at = self._read_sign(text, at)
        return at

    def mark(self, marker: str) -> bool:
        """Whether the marker is part of the arguments: a quote, or anything in a string."""
        if self._quote and self._quote != marker:
            self._end_escape()
            self._json.append(escaped(marker))
        elif self._quote:
            self._end_string()
        elif marker == QUOTE:
            self._begin_string(QUOTE)
        else:
            return False
        return True

    def close(self) -> None:
        """End all that is open."""
        if self._quote:
            self._end_escape()
            self._end_string()
        self._end_word()
        while self._closers:
            self._end_nest(self._closers[-1])

    def _read_sign(self, text: str, at: int) -> int:
        at = self._skip_space(text, at)
        match text[at : at + 1]:
            case "":
                return at
            case "{" | "[" as bracket:
                self._begin_nest(bracket)
            case "}" | "]" as closer:
                self._end_nest(closer)
            case ",":
                self._end_entry()
            case ":":
                if self._due == "colon":
                    self._put_due()
            case '"':
                self._begin_string('"')
            case letter:
                self._word.append(letter)
        return at + 1

    def _skip_space(self, text: str, at: int) -> int:
        found = SPACE.match(text, at)
        return found.end() if found else at

    def _read_word(self, text: str, at: int) -> int:
        end = (KEY_END if self._is_key_due else WORD_END).search(text, at)
        self._word.append(text[at : end.start()] if end else text[at:])
        if end:
            self._end_word()
        return end.start() if end else len(text)

    def _end_word(self) -> None:
        if self._word:
            word = "".join(self._word).rstrip()
            self._word = []
            self._put_due()
            self._json.append(encode(word) if self._due == "key" else value(word))
            self._end_scalar()

    def _begin_string(self, quote: str) -> None:
        self._end_word()
        self._put_due()
        self._json.append('"')
        self._quote = quote

    def _read_string(self, text: str, at: int) -> int:
        """A JSON string's text, up to its end or an escape."""
        end = STRING_END.search(text, at)
        self._json.append(escaped(text[at : end.start()] if end else text[at:]))
        if not end:
            return len(text)
        if end[0] == '"':
            self._end_string()
        else:
            self._escape = "\\"
        return end.end()

    def _read_escape(self, text: str, at: int) -> int:
        """One letter of it; what is no escape is text with a backslash in it."""
        escape = self._escape + text[at]
        if ESCAPE.fullmatch(escape):
            self._json.append(escape)
            self._escape = ""
        elif ESCAPE_BEGUN.fullmatch(escape):
            self._escape = escape
        else:
            self._end_escape()
            return at
        return at + 1

    def _end_escape(self) -> None:
        self._json.append(escaped(self._escape))
        self._escape = ""

    def _end_string(self) -> None:
        self._json.append('"')
        self._quote = ""
        self._end_scalar()

    def _end_scalar(self) -> None:
        self._due = "colon" if self._due == "key" else "comma"

    def _begin_nest(self, bracket: str) -> None:
        """A bracket that is too deep is as if it weren't there."""
        if len(self._closers) == MAX_DEPTH:
            return
        self._put_due()
        if self._due == "key":
            self._json.append('"":')
        self._json.append(bracket)
        self._closers.append(CLOSES[bracket])
        self._due = "key" if bracket == "{" else "value"

    def _end_nest(self, closer: str) -> None:
        """Also ends what is open inside; a closer of nothing is as if it weren't there."""
        ended = ""
        while ended != closer and closer in self._closers:
            self._end_entry()
            ended = self._closers.pop()
            self._json.append(ended)
            self._due = "comma"

    def _end_entry(self) -> None:
        """A key without a value has null."""
        if self._due == "colon":
            self._put_due()
        if self._due == "value" and self._closers[-1] == "}":
            self._json.append("null")
            self._due = "comma"

    @property
    def _is_key_due(self) -> bool:
        return self._due == "key" or (self._due == "comma" and self._closers[-1] == "}")

    def _put_due(self) -> None:
        """The colon or comma before what comes now."""
        if self._due == "colon":
            self._json.append(":")
            self._due = "value"
        elif self._due == "comma":
            self._json.append(",")
            self._due = "key" if self._closers[-1] == "}" else "value"
