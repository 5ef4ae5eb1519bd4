"""The models that have a short name: which repository each is, and which drafts belong to it.

Owns reading catalogue.yaml, names in it, and what fits a machine. Whether the hub has what it lists
is only known once it is asked. Any thread; reads one file, once.
"""

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "catalogue.yaml"


@dataclass(frozen=True)
class Weights:
    """A repository, and about how large it is: from its card, or computed. A pull asks the hub."""

    repo: str
    n_bytes: int


@dataclass(frozen=True)
class Variant:
    """One conversion of a model.

    id      what it is called: gemma-4-e2b, or gemma-4-e2b:8bit where it isn't the default
    tag     4bit, 8bit, bf16, qat-4bit
    drafts  that belong to it, the preferred first
    """

    id: str
    title: str
    tag: str
    weights: Weights
    drafts: tuple[Weights, ...]
    base: str
    is_default: bool

    @property
    def need_bytes(self) -> int:
        """About what serving it takes: weights, draft, and room for a conversation."""
        draft = self.drafts[0].n_bytes if self.drafts else 0
        return int(LOADING * (self.weights.n_bytes + draft)) + ROOM_BYTES


LOADING = 1.05  # weights in memory over their files
ROOM_BYTES = 1_500_000_000  # for requests and what they keep
LIKE = 0.6  # of two names, 1 is the same
QUANTISED = re.compile(r"-\d+bit$", re.IGNORECASE)


@cache
def variants() -> tuple[Variant, ...]:
    """All of the catalogue, in its order."""
    models = yaml.safe_load(FILE.read_text(encoding="utf-8"))["models"]
    return tuple(
        _variant(name, model, tag) for name, model in models.items() for tag in model["variants"]
    )


def _variant(name: str, model: dict[str, Any], tag: str) -> Variant:
    row, is_default = model["variants"][tag], tag == model["default"]
    is_qat = row.get("qat", False)
    drafts = sorted(model["drafts"], key=lambda draft: _rank(draft, is_qat))
    return Variant(
        id=name if is_default else f"{name}:{tag}",
        title=model["title"],
        tag=tag,
        weights=_weights(row),
        drafts=tuple(map(_weights, drafts)),
        base=model["base"],
        is_default=is_default,
    )


def _rank(draft: dict[str, Any], is_qat: bool) -> tuple[bool, bool]:
    """Quantised drafts first, and of each kind the ones made from the same checkpoint."""
    return not QUANTISED.search(draft["repo"]), draft.get("qat", False) is not is_qat


def _weights(row: dict[str, Any]) -> Weights:
    return Weights(row["repo"], round(row["gigabytes"] * 1e9))


def find(name: str) -> Variant | None:
    """By a short name, with or without a variant, or by its repository; case doesn't count."""
    wanted = name.strip().lower()
    for variant in variants():
        short = variant.id.partition(":")[0]
        if wanted in (variant.id, f"{short}:{variant.tag}", variant.weights.repo.lower()):
            return variant
    return None


def canonical(name: str) -> str:
    """The one id that a model has here, however it was named."""
    found = find(name)
    return found.id if found else name


def repo_of(name: str) -> str:
    """Its repository; a name that the catalogue doesn't have is one already, or none."""
    found = find(name)
    return found.weights.repo if found else name


def drafts_of(name: str) -> list[str]:
    """Repositories of the drafts for a model, or for what a conversion says it was made from."""
    found = find(name) or by_base(name)
    return [draft.repo for draft in found.drafts] if found else []


def by_base(base: str) -> Variant | None:
    """The model that a conversion was made from, as cards spell it, quantisation-aware or not."""
    plain = base.strip().lower()
    wanted = plain.partition("-qat-")[0]
    same = [one for one in variants() if one.base.lower() == wanted]
    is_qat = wanted != plain
    return next((one for one in same if one.tag.startswith("qat") is is_qat), None)


def nearest(name: str) -> str | None:
    """The short name most like one that there isn't; None: none is."""
    likeness = {one.id: _likeness(name.lower(), one.id) for one in variants()}
    id = max(likeness, key=lambda one: likeness[one])
    return id if likeness[id] >= LIKE else None


def _likeness(name: str, id: str) -> float:
    """By the whole of it, or by what is peculiar to it."""
    whole = difflib.SequenceMatcher(None, name, id).ratio()
    return max(whole, difflib.SequenceMatcher(None, name, id.removeprefix("gemma-4-")).ratio())


def pick(budget_bytes: int) -> Variant | None:
    """The largest default variant that fits; None: none does."""
    fitting = [one for one in variants() if one.is_default and one.need_bytes <= budget_bytes]
    return max(fitting, key=lambda one: one.need_bytes, default=None)
