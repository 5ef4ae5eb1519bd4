"""The models of this machine: whether their files are whole, and whether each draft fits.

Owns looking and judging, from configs and files' sizes alone. Leaves loading to the engine, which
checks again, and more. Blocking; any thread; no MLX.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_worker import serving
from mlx_worker.config import Config, ModelEntry
from mlx_worker.doctor.check import Check, fault, ok, warning
from mlx_worker.doctor.device import gb
from mlx_worker.engine.checkpoint import Checkpoint, folder_of
from mlx_worker.errors import ConfigError, IncompleteModel, ModelError
from mlx_worker.models import catalogue, pairing
from mlx_worker.models.locate import DEMO, locate, locate_draft
from mlx_worker.models.store import Store
from mlx_worker.records import Source


@dataclass(frozen=True)
class Model:
    """problem: why it can't be served, with `step`; draft_problem: why it is served without one.

    is_configured  in config.yaml, not only pulled
    is_coming      it is not whole, and is being downloaded
    draft          lookup, or the name of one; None: none
    """

    name: str
    is_configured: bool
    n_bytes: int = 0
    problem: str | None = None
    step: str | None = None
    is_coming: bool = False
    draft: str | None = None
    draft_problem: str | None = None


# --- looking ----------------------------------------------------------------------------------


def look(config: Config, store: Store) -> list[Model]:
    """Those in the configuration, then those that were pulled. Raises ConfigError."""
    found = serving.configured(config)
    pulled = [one.id for one in store.models() if one.id not in found]
    entries = found | {id: ModelEntry(id=id) for id in pulled}
    return [
        _model(name, entry, store, is_configured=name in found) for name, entry in entries.items()
    ]


def _model(name: str, entry: ModelEntry, store: Store, *, is_configured: bool) -> Model:
    bare = Model(name, is_configured)
    try:
        source = locate(entry.id, store)
        folder = folder_of(source)
        n_bytes = sum(file.stat().st_size for file in Checkpoint(folder).weight_files())
    except (ModelError, OSError) as error:
        hint = getattr(error, "hint", None) or f"mlx-worker pull {entry.id}"
        is_coming = isinstance(error, IncompleteModel) and _is_coming(entry.id, store)
        what = error.message if isinstance(error, ModelError) else str(error)
        return replace(bare, problem=what, step=hint, is_coming=is_coming)
    return _with_draft(replace(bare, n_bytes=n_bytes), entry, source, folder, store)


def _is_coming(id: str, store: Store) -> bool:
    pulled = store.find(catalogue.canonical(id))
    return pulled is not None and store.presence(pulled).is_downloading


def _with_draft(
    model: Model, entry: ModelEntry, source: str | Source, folder: Path, store: Store
) -> Model:
    if entry.draft in ("none", "lookup"):
        return replace(model, draft=None if entry.draft == "none" else entry.draft)
    try:
        draft = _draft_of(entry, source, folder, store)
        if draft is None:
            why = source.draft_problem if isinstance(source, Source) else None
            return replace(model, draft_problem=why or "none was found for it")
        name = draft.name if isinstance(draft, Source) else Path(draft).name
        return replace(model, draft=name, draft_problem=misfit(folder, folder_of(draft)))
    except (ModelError, OSError) as error:
        return replace(model, draft_problem=str(error))


def _draft_of(
    entry: ModelEntry, source: str | Source, folder: Path, store: Store
) -> str | Source | None:
    """The draft that the engine would take. Raises ModelError."""
    if entry.draft != "auto":
        return locate_draft(entry.draft, store, of=entry.id)
    if isinstance(source, Source) and source.draft:
        return source.draft
    beside = folder.parent / ("assistant" if source == DEMO else f"{folder.name}-assistant")
    return str(beside) if beside.is_dir() else None


def misfit(target: Path, draft: Path) -> str | None:
    """Why a draft can't be this target's; None: nothing speaks against it. Raises ModelError."""
    its = Checkpoint(draft)
    its.weight_files()
    if why := pairing.mismatch(Checkpoint(target).config, its.config):
        return why
    ours, theirs = pairing.vocabulary(target), pairing.vocabulary(draft)
    if theirs and ours != theirs:
        return f"tokenizer vocabulary: the model has {ours}, the draft has {theirs}"
    return None


# --- judging ----------------------------------------------------------------------------------


def model_checks(models: list[Model], budget_bytes: int) -> Iterator[Check]:
    """Of each; budget_bytes: that the worker may hold."""
    if not models:
        fitting = catalogue.pick(budget_bytes)
        step = f"mlx-worker pull {fitting.id}" if fitting else "mlx-worker models --catalogue"
        yield warning("models", "none is here yet; the demo pair, a toy, is served", step)
    for model in models:
        yield _check(model, budget_bytes)


def _check(model: Model, budget_bytes: int) -> Check:
    name = f"model {model.name}"
    if model.problem:
        step = model.step or f"mlx-worker pull {model.name}"
        if model.is_coming:
            return warning(name, f"{model.problem}; it is being downloaded", "wait for its end")
        return (fault if model.is_configured else warning)(name, model.problem, step)
    size = gb(model.n_bytes)
    if model.n_bytes > budget_bytes:
        what = f"its files have {size}, the worker may hold {gb(budget_bytes)}"
        step = "choose a smaller or more quantised one, or raise limits.memory_gb"
        return fault(name, what, step)
    if model.draft_problem:
        what = f"whole, {size}; served without a draft: {model.draft_problem}"
        return warning(name, what, f"mlx-worker pull {model.name}, or draft: none in config.yaml")
    return ok(name, f"whole, {size}; {f'draft {model.draft}' if model.draft else 'no draft'}")


def checks(config: Config, budget_bytes: int) -> list[Check]:
    try:
        found = look(config, Store.default())
    except ConfigError as error:
        return [fault("models", error.message, error.hint or "mend config.yaml")]
    return list(model_checks(found, budget_bytes))


def n_bytes(entry: ModelEntry) -> int:
    """Of its files; 0 where that can't be told."""
    try:
        return _model(entry.id, entry, Store.default(), is_configured=True).n_bytes
    except (ConfigError, ModelError):
        return 0


def to_probe(config: Config, room_bytes: int) -> ModelEntry:
    """What is served by default, where it is whole and has room; else the demo pair."""
    try:
        store = Store.default()
        entry = serving.default(config, store)
        model = _model(entry.id, entry, store, is_configured=True)
    except (ConfigError, ModelError):
        return ModelEntry(id=DEMO)
    fits = not model.problem and model.n_bytes < room_bytes
    return entry if fits else ModelEntry(id=DEMO)
