"""The plain records of the gateway, and which role may do what.

Owns the words. Leaves keeping them to store.py, and connected workers to registry.py. Times
are Unix seconds. Pure; any thread.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from mlx_worker.records import PLATFORM, Settings
from mlx_worker.wire.link import ModelReport

Role = Literal["owner", "operator", "member"]
Permission = Literal["inference", "view_workers", "manage_workers", "view_usage", "manage_keys"]
PERMISSIONS: tuple[Permission, ...] = get_args(Permission)
ALLOWED: dict[Role, frozenset[Permission]] = {
    "owner": frozenset(PERMISSIONS),
    "operator": frozenset({"inference", "view_workers", "manage_workers", "view_usage"}),
    "member": frozenset({"inference", "view_workers", "view_usage"}),
}


@dataclass(frozen=True)
class Organisation:
    """Owns keys, workers and usage.

    is_speculation_available  the platform offers it drafting; False: it sees no line of it
    """

    id: str
    name: str
    created_s: float
    is_speculation_available: bool = True


@dataclass(frozen=True)
class Key:
    """An API key, without what it is: that is shown once, and kept as a digest.

    organisation_id  None: a platform key, which may do what the platform does, and nothing else
    extra            permissions beside those of its role
    hint             its first characters, to tell it from others
    """

    id: str
    organisation_id: str | None
    name: str
    role: Role
    extra: frozenset[Permission]
    hint: str
    created_s: float
    revoked_s: float | None = None

    @property
    def permissions(self) -> frozenset[Permission]:
        return frozenset() if self.organisation_id is None else ALLOWED[self.role] | self.extra

    @property
    def is_platform(self) -> bool:
        return self.organisation_id is None


@dataclass(frozen=True)
class Report:
    """What a worker last said of itself. settings None: it is too old to say."""

    version: str = ""
    capabilities: frozenset[str] = frozenset()
    settings: Settings | None = None
    settings_revision: int = 0
    settings_problem: str | None = None
    models: tuple[ModelReport, ...] = ()


@dataclass(frozen=True)
class Enrolled:
    """A worker that was added, connected or not.

    is_off_by_platform  drafting is switched off for this one by the platform
    pending             a change of settings that it has not acknowledged, and its revision
    seen_s              when it was last connected; None: never
    """

    id: str
    organisation_id: str
    name: str
    hint: str
    created_s: float
    disabled_s: float | None = None
    is_off_by_platform: bool = False
    report: Report = Report()
    pending: dict[str, object] = field(default_factory=dict[str, object])
    pending_revision: int = 0
    seen_s: float | None = None


@dataclass(frozen=True)
class PlatformState:
    """The platform's own switch of drafting, over all organisations."""

    revision: int = 0
    speculative_decoding: Literal["auto", "off"] = "auto"
    display_name: str = PLATFORM


@dataclass(frozen=True)
class UsageRow:
    """One request: begun when it came, ended once its reply or its error was sent.

    Rows that were begun and never ended are of a gateway that was killed; the next start ends them
    with the error gateway_restarted.
    draft_acceptance_rate  None: no draft was used
    """

    id: int
    request_id: str
    at_s: float
    organisation_id: str
    key_id: str
    key_name: str
    model: str
    endpoint: Literal["chat", "completion"]
    is_streamed: bool
    worker_id: str | None = None
    worker_name: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_ms: float | None = None
    tokens_per_second: float | None = None
    draft_acceptance_rate: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    ended_s: float | None = None


@dataclass(frozen=True)
class AuditEntry:
    """Who changed what.

    actor    the name and id of a key, or "command line"
    action   such as worker.speculative_decoding, key.create
    target   the id of what was changed; details: the new value, in words
    """

    id: int
    at_s: float
    organisation_id: str | None
    actor: str
    action: str
    target: str
    details: str
