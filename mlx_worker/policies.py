"""policies.json: what a user switches while the worker runs, kept beside config.yaml.

Owns the file. Keys in it that are another's are kept. A file that can't be read is never written
over, and until it is mended drafting counts as switched off: whoever switched it off meant it.
Blocking; any thread.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from mlx_worker.config import home
from mlx_worker.errors import ConfigError, InvalidParameter, shown
from mlx_worker.files import write_whole
from mlx_worker.records import Settings

FILE = "policies.json"
VALUES: Mapping[str, tuple[object, ...]] = {
    "speculative_decoding": ("auto", "off"),
    "kv_prefix_cache": (True, False),
}
DEFAULTS = Settings()
MEND = "mend the file, or delete it to begin with the defaults"


def default_path() -> Path:
    return home() / FILE


class Policies:
    """The file at `path`; it may not exist yet. defaults: of what it doesn't say."""

    def __init__(self, path: Path, defaults: Settings = DEFAULTS) -> None:
        self.path = path
        self._defaults = defaults
        self._lock = Lock()  # from reading what is there to writing what comes of it

    def read(self) -> tuple[Settings, str | None]:
        """The settings, and why the file could not be read; None: it could, or there is none."""
        try:
            return self._settings(self._values()), None
        except ConfigError as error:
            return replace(self._defaults, speculative_decoding="off"), str(error)

    def change(self, changes: Mapping[str, Any]) -> Settings:
        """Keep new values of some settings; returns all of them.

        Raises InvalidParameter for a value that no setting has, ConfigError for a file that can't
        be read or written; it is as it was then.
        """
        check(changes)
        with self._lock:
            values = {**self._values(), **changes}
            self._write(values)
        return self._settings(values)

    def _settings(self, values: Mapping[str, Any]) -> Settings:
        return replace(self._defaults, **{name: values[name] for name in VALUES if name in values})

    def _values(self) -> dict[str, Any]:
        try:
            text = self.path.read_text(encoding="utf-8")
            values = json.loads(text)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: can't be read: {error}", hint=MEND) from None
        if not isinstance(values, dict):
            raise ConfigError(f"{self.path}: {shown(values)}, must be an object", hint=MEND)
        try:
            check({name: values[name] for name in VALUES if name in values})
        except InvalidParameter as error:
            raise ConfigError(f"{self.path}: {error.message}", hint=MEND) from None
        return values

    def _write(self, values: Mapping[str, Any]) -> None:
        try:
            write_whole(self.path, json.dumps(values, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"{self.path}: can't be written: {error.strerror}") from None


def check(changes: Mapping[str, Any]) -> None:
    """Raises InvalidParameter for the first that is no setting, or has no such value."""
    for name, value in changes.items():
        if name not in VALUES:
            raise InvalidParameter(name, value, f"one of {', '.join(VALUES)}")
        if not any(value is one or (value == one and type(value) is str) for one in VALUES[name]):
            words = " or ".join(json.dumps(one).strip('"') for one in VALUES[name])
            raise InvalidParameter(name, value, words)
