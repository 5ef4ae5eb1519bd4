"""policies.json: what a user switches while the worker runs, kept beside config.yaml.

Owns the file. Keys in it that are another's are kept. A file that can't be read is never written
over, and until it is mended drafting counts as switched off: whoever switched it off meant it.
Blocking; any thread.

    {"speculative_decoding_disabled": true, "kv_prefix_cache": true,
     "run_requests_together": false, "revision": 3}

revision counts the changes, so that one from elsewhere that is older than the file isn't obeyed. A
setting that isn't there is as config.yaml has it. Older files say "speculative_decoding": "auto" or
"off" instead; the next change puts the newer key in its place.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from mlx_worker.config import home
from mlx_worker.errors import ConfigError, InvalidParameter, shown
from mlx_worker.files import write_whole
from mlx_worker.records import MAX_REVISION, Settings

FILE = "policies.json"
VALUES: Mapping[str, tuple[object, ...]] = {
    "speculative_decoding": ("auto", "off"),
    "kv_prefix_cache": (True, False),
    "run_requests_together": (True, False),
}
DISABLED = "speculative_decoding_disabled"
OLD = "speculative_decoding"  # in the file, in the place of DISABLED
IN_FILE: Mapping[str, tuple[object, ...]] = {**VALUES, DISABLED: (True, False)}
REVISION = "revision"
DEFAULTS = Settings()
MEND = "mend the file, or delete it to begin with the defaults"


class Kept(NamedTuple):
    """What is in force.

    problem  why the file could not be read, or the last change not be kept; None: all is well
    """

    settings: Settings
    problem: str | None = None
    revision: int = 0


def default_path() -> Path:
    return home() / FILE


class Policies:
    """The file at `path`; it may not exist yet. defaults: of what it doesn't say."""

    def __init__(self, path: Path, defaults: Settings = DEFAULTS) -> None:
        self.path = path
        self._defaults = defaults
        self._lock = Lock()  # from reading what is there to writing what comes of it

    def read(self) -> Kept:
        try:
            return self._kept(self._values())
        except ConfigError as error:
            return Kept(replace(self._defaults, speculative_decoding="off"), str(error))

    def change(self, changes: Mapping[str, Any], revision: int | None = None) -> Kept:
        """Keep new values of some settings; returns all of them.

        revision  of a change from elsewhere, which counts only if it is above the file's; None: a
                  change made here, the next one

        Raises InvalidParameter for a value that no setting has, ConfigError for a file that can't
        be read or written; it is as it was then.
        """
        check(changes, VALUES)
        with self._lock:
            values = self._values()
            own = values.get(REVISION, 0)
            if revision is None:
                revision = int(own + 1 if changes else own)
            if revision >= MAX_REVISION:
                raise ConfigError(f"{self.path}: {REVISION}: {MAX_REVISION - 1} is the last one")
            if revision > own:
                values = {**in_file(values), **in_file(changes), REVISION: revision}
                self._write(values)
        return self._kept(values)

    def _kept(self, values: Mapping[str, Any]) -> Kept:
        named = {name: values[name] for name in VALUES if name in values}
        if DISABLED in values:
            named[OLD] = "off" if values[DISABLED] else "auto"
        return Kept(replace(self._defaults, **named), None, values.get(REVISION, 0))

    def _values(self) -> dict[str, Any]:
        try:
            text = self.path.read_text(encoding="utf-8")
            values = json.loads(text)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.path}: can't be read: {error}", hint=MEND) from None
        if not isinstance(values, dict):
            raise ConfigError(f"{self.path}: {shown(values)}, must be an object", hint=MEND)
        try:
            check({name: values[name] for name in IN_FILE if name in values}, IN_FILE)
            check_revision(values.get(REVISION, 0))
        except InvalidParameter as error:
            raise ConfigError(f"{self.path}: {error.message}", hint=MEND) from None
        return values

    def _write(self, values: Mapping[str, Any]) -> None:
        try:
            write_whole(self.path, json.dumps(values, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"{self.path}: can't be written: {error.strerror}") from None


def in_file(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same as the file names them."""
    renamed = {name: value for name, value in values.items() if name != OLD}
    if OLD in values and DISABLED not in values:
        renamed[DISABLED] = values[OLD] == "off"
    return renamed


def check(given: Mapping[str, Any], known: Mapping[str, tuple[object, ...]]) -> None:
    """Raises InvalidParameter for the first that is no setting, or has no such value."""
    for name, value in given.items():
        if name not in known:
            raise InvalidParameter(name, value, f"one of {', '.join(known)}")
        if not any(value is one or (value == one and type(value) is str) for one in known[name]):
            words = " or ".join(json.dumps(one).strip('"') for one in known[name])
            raise InvalidParameter(name, value, words)


def check_revision(value: object) -> None:
    if type(value) is not int or not 0 <= value < MAX_REVISION:
        raise InvalidParameter(REVISION, value, f"a whole number from 0 to {MAX_REVISION - 1}")
