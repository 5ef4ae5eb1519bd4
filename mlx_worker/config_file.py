"""Changing one setting in config.yaml, and nothing else in it: comments, order and quotes stay.

Owns where in the text a value stands, or would. Leaves what may be set to config.py. A file that
can't be read, or whose change can't be shown to be that one alone, is left as it is. Blocking; any
thread.
"""

import difflib
import json
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml

from mlx_worker.config import (
    CONFIG_FILE,
    OLD_MODEL,
    SECRET_KEYS,
    Config,
    Loader,
    check,
    entry_keys,
    is_there,
    known,
    known_keys,
    nearest,
    parse,
    parse_yaml,
    read_text,
    renewed,
)
from mlx_worker.errors import ConfigError, shown
from mlx_worker.files import write_whole

MODELS = "models"
STEP = 2  # columns that what is new is indented by
UNSET = object()

Keys = tuple[str, ...]  # ("server", "port"), ("models", ID, "sampling", "temperature")


class ByHand(Exception):
    """The file is written in a way that this file can't change."""


class Edit(NamedTuple):
    """What stands between two indices of the text is to be this."""

    start: int
    end: int
    text: str


def set(file: Path, key: str, text: str) -> None:
    """Set a key. text: its value in YAML; of a secret, as it is.

    key  dotted; models.ID.draft is the draft of the entry with that id, which is made if need be

    Raises ConfigError: an unknown key, a bad value, a file that can't be read, changed or written.
    """
    keys = keys_of(key)
    if key in SECRET_KEYS:
        _change(file, key, keys, text)
        return
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: {shown(text)}, must be YAML", hint="quote it") from None
    _change(file, key, keys, value)


def unset(file: Path, key: str) -> None:
    """Take a key out, so that its default counts. Raises ConfigError."""
    keys = keys_of(key)
    if is_there(file):
        _change(file, key, keys, UNSET)


def keys_of(key: str) -> Keys:
    """A dotted key, whose model's id may have dots too. Raises ConfigError for an unknown one."""
    if key in known_keys():
        return tuple(key.split("."))
    entries = sorted((one for one in entry_keys() if one != "id"), key=len, reverse=True)
    if key.startswith(f"{MODELS}."):
        rest = key.removeprefix(f"{MODELS}.")
        for one in entries:
            if rest.endswith(f".{one}") and (id := rest.removesuffix(f".{one}")):
                return (MODELS, id, *one.split("."))
        last = rest.rpartition(".")[2]
        near = max(entries, key=lambda one: difflib.SequenceMatcher(None, last, one).ratio())
        raise ConfigError(f"unknown key: {key}", hint=f"did you mean models.ID.{near}?")
    if key in Config.model_fields:
        some = next(one for one in known_keys() if one.startswith(f"{key}."))
        raise ConfigError(f"{key}: is a section, not a key", hint=f"name one of it, as in {some}")
    raise ConfigError(f"unknown key: {key}", hint=f"did you mean {nearest(key)}?")


def _change(file: Path, key: str, keys: Keys, value: object) -> None:
    old = read_text(file) if is_there(file) else ""
    values = parse(old, file)[0]
    if OLD_MODEL in values and keys[0] == MODELS:
        raise ConfigError(
            f"{file}: has {OLD_MODEL}, of an older version",
            hint="write it as an entry of models first, as in models: [{id: NAME}]",
        )
    wanted = _with(values, keys, value)
    check(known(renewed(wanted, {})[0]), {})  # keys of a later version are kept, not judged
    try:
        new = _edited(old, keys, value, wanted)
    except (ByHand, ConfigError):
        raise ConfigError(
            f"{file}: {key} can't be changed without changing more, as the file is written",
            hint="change it by hand",
        ) from None
    if new == old and is_there(file):
        return
    try:
        write_whole(file, new)
    except OSError as failed:
        raise ConfigError(f"{file}: can't be written: {failed.strerror}") from None


def _edited(text: str, keys: Keys, value: object, wanted: dict[str, Any]) -> str:
    """The text with that one change. Raises ByHand where it would be another."""
    new = _applied(text, _edits(text, keys, value))
    if _plain(parse(new, Path(CONFIG_FILE))[0]) != _plain(wanted):
        raise ByHand
    return new


# --- what the values would be -----------------------------------------------------------------


def _with(values: dict[str, Any], keys: Keys, value: object) -> dict[str, Any]:
    """The values with that one change. Leaves `values` as they are."""
    first, *rest = keys
    if first == MODELS and rest:
        found = values.get(MODELS) or []
        return {**values, MODELS: _with_entry(found, keys[1], keys[2:], value)}
    if rest:
        inner = values.get(first)
        inner = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
        return {**values, first: _with(inner, keys[1:], value)}
    if value is UNSET:
        return {name: one for name, one in values.items() if name != first}
    return {**values, first: value}


def _with_entry(entries: object, id: str, keys: Keys, value: object) -> object:
    if not isinstance(entries, list):
        return entries  # which is refused
    items = cast("list[Any]", entries)
    if not any(_is_entry(one, id) for one in items):
        return items if value is UNSET else [*items, _with({"id": id}, keys, value)]
    return [_with(one, keys, value) if _is_entry(one, id) else one for one in items]


def _is_entry(value: object, id: str) -> bool:
    return isinstance(value, dict) and cast("dict[str, Any]", value).get("id") == id


def _plain(values: dict[str, Any]) -> str:
    """The same text for the same values; an empty section is none."""
    found = {name: one for name, one in values.items() if one not in ({}, [], None)}
    entries = found.get(MODELS)
    if isinstance(entries, list):
        found[MODELS] = [_plain_entry(one) for one in cast("list[Any]", entries)]
    return json.dumps(found, sort_keys=True, default=repr)


def _plain_entry(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    items = cast("dict[str, Any]", entry).items()
    return {name: one for name, one in items if name != "sampling" or one}


# --- where they stand in the text -------------------------------------------------------------


def _applied(text: str, edits: list[Edit]) -> str:
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _edits(text: str, keys: Keys, value: object) -> list[Edit]:
    """Raises ByHand."""
    root = cast("yaml.Node | None", yaml.compose(text, Loader=Loader))  # pyright: ignore[reportUnknownMemberType]
    page = Page(text)
    if value is UNSET:
        return [] if root is None else page.remove(root, keys)
    if root is None:
        return [page.append(page.block(keys, value, 0))]
    return page.put(root, keys, value)


class Page:
    """A file's text, and what must be edited in it for a change."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = "\r\n" if "\r\n" in text else "\n"

    # --- setting

    def put(self, node: yaml.Node, keys: Keys, value: object) -> list[Edit]:
        """Set what `keys` name in a mapping, or in the list of the models."""
        if isinstance(node, yaml.SequenceNode):
            return self._put_entry(node, keys, value)
        if not isinstance(node, yaml.MappingNode):
            raise ByHand
        pair = _pair(node, keys[0])
        if pair is None:
            return [self._insert(node, keys, value)]
        key, found = pair
        if len(keys) == 1:
            return self._replace(key, found, value)
        if not _is_null(found):
            return self.put(found, keys[1:], value)
        if found.start_mark.index < found.end_mark.index or node.flow_style:
            return [self._write_over(found, _inner(keys, value))]
        lines = self._below(keys, value, key.start_mark.column + STEP)
        return [self._after_line(key.end_mark.index, lines)]

    def _put_entry(self, node: yaml.SequenceNode, keys: Keys, value: object) -> list[Edit]:
        for item in node.value:
            pair = _pair(item, "id") if isinstance(item, yaml.MappingNode) else None
            if pair and pair[1].value == keys[0]:
                return self.put(item, keys[1:], value)
        if node.flow_style:
            return [self._join(node, flow(_entry(keys, value)))]
        lines = self._entry_block(keys, value, node.start_mark.column)
        return [self._after_line(_end_of(node, self._text), lines)]

    def _insert(self, node: yaml.MappingNode, keys: Keys, value: object) -> Edit:
        """A key that a mapping doesn't have yet; behind the others."""
        if node.flow_style:
            return self._join(node, f"{keys[0]}: {_inner(keys, value)}")
        column = node.start_mark.column
        lines = self.block(keys, value, column)
        if column == 0:
            return self.append(lines)
        return self._after_line(_end_of(node, self._text), lines)

    def _replace(self, key: yaml.Node, found: yaml.Node, value: object) -> list[Edit]:
        if not _is_block(found):
            return [self._write_over(found, flow(value))]
        # The value goes behind the key, before what comment is there; its old lines go.
        colon = self._text.index(":", key.end_mark.index) + 1
        start = self._line_start(found.start_mark.index)
        end = self._line_end(_end_of(found, self._text))
        if start <= colon:
            raise ByHand
        return [Edit(colon, colon, f" {flow(value)}"), Edit(start, end, "")]

    def _write_over(self, found: yaml.Node, text: str) -> Edit:
        start, end = found.start_mark.index, _end_of(found, self._text)
        if end <= start:  # nothing was there but the colon
            return Edit(start, start, f" {text}")
        return Edit(start, end, text)

    def _join(self, node: yaml.CollectionNode, text: str) -> Edit:
        """One more item in a flow collection."""
        if not node.value:
            start = node.start_mark.index + 1
            return Edit(start, start, text)
        last: Any = node.value[-1]
        end = _end_of(last[1] if isinstance(last, tuple) else last, self._text)
        return Edit(end, end, f", {text}")

    def block(self, keys: Keys, value: object, column: int) -> list[str]:
        """Lines that set this, and nothing but it."""
        first = f"{' ' * column}{keys[0]}:"
        if not keys[1:]:
            return [f"{first} {flow(value)}"]
        return [first, *self._below(keys, value, column + STEP)]

    def _below(self, keys: Keys, value: object, column: int) -> list[str]:
        """The lines below the first of the keys."""
        if keys[0] == MODELS:
            return self._entry_block(keys[1:], value, column)
        return self.block(keys[1:], value, column)

    def _entry_block(self, keys: Keys, value: object, column: int) -> list[str]:
        first = f"{' ' * column}- id: {flow(keys[0])}"
        return [first, *self.block(keys[1:], value, column + STEP)]

    def append(self, lines: list[str]) -> Edit:
        return self._after_line(len(self._text), lines)

    def _after_line(self, index: int, lines: list[str]) -> Edit:
        """New lines behind the one that the index is in."""
        start = self._line_end(index)
        new = self._end.join(lines)
        if start and not self._text[:start].endswith("\n"):
            return Edit(start, start, self._end + new)
        return Edit(start, start, new + self._end)

    # --- taking out

    def remove(self, node: yaml.Node, keys: Keys) -> list[Edit]:
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                pair = _pair(item, "id") if isinstance(item, yaml.MappingNode) else None
                if pair and pair[1].value == keys[0]:
                    return self.remove(item, keys[1:])
            return []
        pair = _pair(node, keys[0]) if isinstance(node, yaml.MappingNode) else None
        if pair is None or not isinstance(node, yaml.MappingNode):
            return []
        if len(keys) > 1:
            return self.remove(pair[1], keys[1:])
        at = node.value.index(pair)
        return [self._without(node, at) if node.flow_style else self._without_lines(node, at)]

    def _without(self, node: yaml.MappingNode, at: int) -> Edit:
        """A key of a flow mapping goes, and a comma with it."""
        key, found = node.value[at]
        end = max(key.end_mark.index, _end_of(found, self._text))
        if at + 1 < len(node.value):
            return Edit(key.start_mark.index, node.value[at + 1][0].start_mark.index, "")
        if at:
            return Edit(_end_of(node.value[at - 1][1], self._text), end, "")
        return Edit(key.start_mark.index, end, "")

    def _without_lines(self, node: yaml.MappingNode, at: int) -> Edit:
        """A key of a block mapping goes, and its lines with it."""
        key, found = node.value[at]
        start = self._line_start(key.start_mark.index)
        if self._text[start : key.start_mark.index].strip():  # a list's dash is before it
            if at + 1 == len(node.value):
                raise ByHand
            end = node.value[at + 1][0].start_mark.index
            if "#" in self._text[_end_of(found, self._text) : end]:
                raise ByHand
            return Edit(key.start_mark.index, end, "")
        end = max(key.end_mark.index, _end_of(found, self._text))
        return Edit(start, self._line_end(end), "")

    # --- lines

    def _line_start(self, index: int) -> int:
        return self._text.rfind("\n", 0, index) + 1

    def _line_end(self, index: int) -> int:
        """The index behind the line break of the line that the index is in."""
        return self._text.find("\n", index) + 1 or len(self._text)


def _pair(node: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    return next((pair for pair in node.value if pair[0].value == name), None)


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def _is_block(node: yaml.Node) -> bool:
    return isinstance(node, yaml.CollectionNode) and not node.flow_style


def _end_of(node: yaml.Node, text: str) -> int:
    """The index behind a value; PyYAML's own of a block is where the next thing begins."""
    if _is_block(node) and node.value:
        last: Any = node.value[-1]
        if not isinstance(last, tuple):
            return _end_of(last, text)
        return max(last[0].end_mark.index + 1, _end_of(last[1], text))
    start, end = node.start_mark.index, node.end_mark.index
    return start + len(text[start:end].rstrip())


def _entry(keys: Keys, value: object) -> dict[str, Any]:
    return _with({"id": keys[0]}, keys[1:], value)


def _inner(keys: Keys, value: object) -> str:
    """What stands behind the first of the keys, on one line: `{temperature: 0.5}`."""
    rest = keys[1:]
    if not rest:
        return flow(value)
    return flow([_entry(rest, value)] if keys[0] == MODELS else _with({}, rest, value))


def flow(value: object) -> str:
    """A value on one line, in whatever context it is put."""
    text = yaml.safe_dump(
        [value], default_flow_style=True, width=1 << 30, allow_unicode=True, sort_keys=False
    )
    return text.strip()[1:-1]
