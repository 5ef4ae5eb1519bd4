"""Which models a worker serves: those in the configuration, then those that were pulled.

Owns their order, so which is the default, and what clients call each. Leaves which of them are in
memory to roster.py, and where their files are to models/. Blocking; any thread.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from mlx_worker.config import Config, ModelEntry, override
from mlx_worker.errors import ConfigError
from mlx_worker.files import expanded
from mlx_worker.models import catalogue
from mlx_worker.models.locate import DEMO, is_local
from mlx_worker.models.store import Store

Models = Mapping[str, ModelEntry]  # what clients call each, the default first


def name_of(id: str) -> str:
    """What clients call a model: a folder by its last part, others by their one id."""
    if not is_local(id):
        return catalogue.canonical(id)
    path = expanded(id)
    return Path(os.path.abspath(path)).name if path.is_dir() else id


def models(config: Config, store: Store | None = None) -> dict[str, ModelEntry]:
    """What clients call each model → how it is served, as a worker that starts now would.

    Of what was pulled, that is whole; the first that isn't where there is nothing else; the demo
    pair where there is nothing at all.

    Raises ConfigError: two have one name, a folder isn't there, models.json can't be read.
    """
    found = configured(config)
    is_whole = pulled(store or Store.default(), found)
    ids = [id for id in is_whole if is_whole[id]] or list(is_whole)[: 0 if found else 1]
    return found | {id: ModelEntry(id=id) for id in ids} or {DEMO: ModelEntry(id=DEMO)}


def pulled(store: Store, but: Collection[str]) -> dict[str, bool]:
    """Those that were pulled, in that order → whether all of it is here. Raises ConfigError."""
    return {one.id: store.presence(one).is_whole for one in store.models() if one.id not in but}


def configured(config: Config) -> dict[str, ModelEntry]:
    """Those in the configuration alone. Raises ConfigError."""
    found: dict[str, ModelEntry] = {}
    for n, entry in enumerate(config.models):
        if entry.id.startswith(("/", "~", ".")) and not expanded(entry.id).is_dir():
            raise ConfigError(f"models.{n}.id: {entry.id} is no folder")
        name = name_of(entry.id)
        if name in found:
            raise ConfigError(
                f"models.{n}.id: {entry.id} would be called {name}, as {found[name].id} is",
                hint="rename one of the folders, or take one of the entries out",
            )
        found[name] = entry
    return found


def drafts(config: Config) -> dict[str, str]:
    """Models for which the configuration names a draft → what a pull is to get: "none" for one
    that needs no files. Raises ConfigError.
    """
    named = {name: entry.draft for name, entry in configured(config).items()}
    return {
        name: "none" if draft == "lookup" or is_local(draft) else draft
        for name, draft in named.items()
        if draft != "auto"
    }


def default(config: Config, store: Store | None = None) -> ModelEntry:
    """The one that is meant where none is named. Raises ConfigError."""
    return next(iter(models(config, store).values()))


def named(config: Config, model: str | None, store: Store | None = None) -> ModelEntry:
    """The entry of a model that is named, whether it is configured or not; None: the default.

    Raises ConfigError.
    """
    if model is None:
        return default(config, store)
    same = (entry for entry in config.models if is_same(entry.id, model))
    return next(same, ModelEntry(id=model))


def with_flags(
    config: Config, model: str | None, draft: str | None, store: Store | None = None
) -> Config:
    """The configuration with the model that is named first in it, else with the default's draft.

    Raises ConfigError.
    """
    if model is None and draft is None:
        return config
    first = named(config, model, store)
    if draft is not None:
        first = first.model_copy(update={"draft": draft})
    others = [entry for entry in config.models if not is_same(entry.id, first.id)]
    return override(config, {"models": [entry.model_dump() for entry in (first, *others)]})


def is_same(one: str, other: str) -> bool:
    """Whether both name one model."""
    return _place(one) == _place(other)


def _place(id: str) -> str:
    if not is_local(id):
        return catalogue.canonical(id)
    return id if id == DEMO else str(Path(os.path.abspath(expanded(id))))


def preloaded(models: Models, most: int) -> list[str]:
    """Which are loaded at the start: those that say so, and the default if there is room."""
    wanted = [name for name, entry in models.items() if entry.preload]
    first = next(iter(models), None)
    if first and models[first].preload is None and len(wanted) < most:
        wanted.insert(0, first)
    return wanted


class Offer:
    """What there is to serve, looked at again where something may have changed.

    What is being pulled comes once it is whole; what is here stays while it is pulled anew.
    """

    def __init__(self, config: Config, store: Store | None = None) -> None:
        """Raises ConfigError."""
        self._configured = configured(config)
        self._store = store or Store.default()
        self._seen = self._stamp()
        self.models = models(config, self._store)
        is_whole = pulled(self._store, self._configured)
        self._is_waiting = not all(is_whole.values())  # files come without a word in models.json

    def changed(self) -> dict[str, ModelEntry] | None:
        """What there is now, where models.json was written, or a model has become whole.

        Raises ConfigError for a file that can't be read, once for each state of it.
        """
        stamp = self._stamp()
        is_written = stamp != self._seen
        if not is_written and not self._is_waiting:
            return None
        self._seen, self._is_waiting = stamp, False
        found = self._configured
        is_whole = pulled(self._store, found)
        ids = [id for id in is_whole if is_whole[id] or id in self.models]
        self._is_waiting = len(ids) < len(is_whole)
        found = found | {id: ModelEntry(id=id) for id in ids} or {DEMO: ModelEntry(id=DEMO)}
        if not is_written and list(found.items()) == list(self.models.items()):
            return None
        self.models = found
        return found

    def _stamp(self) -> tuple[int, ...]:
        try:
            stat = self._store.path.stat()
        except OSError:
            return ()
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
