"""What is shown of a worker: its facts, its models, and the line of each model's draft.

Owns which of the nine statuses the gateway knows better than the worker: Starting, Needs a worker
update, Off by the platform, no line. Leaves their precedence and their texts to records.py. Pure.
"""

from dataclasses import asdict
from typing import Any

from mlx_worker.gateway.connected import Connected
from mlx_worker.gateway.records import Enrolled, Organisation, PlatformState, Report
from mlx_worker.gateway.registry import CAPABILITIES
from mlx_worker.records import Status, effective_status, status_text
from mlx_worker.wire.link import DECIDES, SETTING, ModelReport


def lines(
    enrolled: Enrolled,
    connected: Connected | None,
    organisation: Organisation,
    platform: PlatformState,
) -> list[dict[str, Any]]:
    """The models of a worker, each with the line of its draft; None: there is none."""
    report = report_of(enrolled, connected)
    found = []
    for model in report.models:
        status = status_of(model, report, connected, organisation, platform, enrolled)
        text = status_text(status, platform.display_name)
        shown = {
            "id": model.id,
            "is_loaded": model.is_loaded,
            "context_tokens": model.context_tokens,
            "model_bytes": model.model_bytes,
            "draft": model.draft,
            "draft_bytes": model.draft_bytes,
            "draft_problem": model.draft_problem,
            "speculation": text,
            "measured": None if text is None or model.speculation is None else asdict(status),
        }
        found.append(shown if organisation.is_speculation_available else without_draft(shown))
    return found


def status_of(
    model: ModelReport,
    report: Report,
    connected: Connected | None,
    organisation: Organisation,
    platform: PlatformState,
    enrolled: Enrolled,
) -> Status:
    """Which of the nine applies."""
    settings = report.settings
    measured = measured_of(model, connected)
    return effective_status(
        measured,
        has_draft=organisation.is_speculation_available and has_draft(model, connected),
        decides=DECIDES in report.capabilities,
        is_off_by_platform=platform.speculative_decoding == "off" or enrolled.is_off_by_platform,
        is_off_by_settings=settings is not None and settings.speculative_decoding == "off",
        is_paused=settings is not None and settings.run_requests_together,
    )


def measured_of(model: ModelReport, connected: Connected | None) -> Status | None:
    """What the worker said of it; None: nothing yet."""
    if model.speculation is not None:
        return model.speculation.status
    if connected is not None and connected.has_reported and not model.is_loaded:
        return Status("automatic", why="no request since the load")
    return None


def has_draft(model: ModelReport, connected: Connected | None) -> bool:
    """One that could be used. Of a worker that is away and never said anything, nothing is."""
    if model.draft is None or model.draft_problem is not None:
        return False
    if model.speculation is None:
        return connected is not None
    return model.speculation.state != "none"


def without_draft(shown: dict[str, Any]) -> dict[str, Any]:
    """For an organisation that isn't offered drafts: nothing of them."""
    return shown | dict.fromkeys(("draft", "draft_bytes", "draft_problem"))


def worker_json(
    enrolled: Enrolled,
    connected: Connected | None,
    organisation: Organisation,
    platform: PlatformState,
) -> dict[str, Any]:
    """A worker as the API shows it. Times are Unix seconds."""
    report = report_of(enrolled, connected)
    is_off = platform.speculative_decoding == "off" or enrolled.is_off_by_platform
    pending = enrolled.pending if connected is None else connected.desk.pending
    return {
        "id": enrolled.id,
        "name": enrolled.name,
        "version": report.version or None,
        "connected": connected is not None,
        "since": None if connected is None else connected.since_s,
        "seen": enrolled.seen_s,
        "draining": connected is not None and connected.is_draining,
        "settings": None if report.settings is None else asdict(report.settings),
        "settings_problem": report.settings_problem,
        "settings_pending": bool(pending),
        "speculative_pinned_off": pinned_off(report),
        "takes": {name: needed in report.capabilities for name, needed in CAPABILITIES.items()},
        "platform": {
            "speculative_decoding": "off" if is_off else "auto",
            "display_name": platform.display_name,
        },
        "queue": None if connected is None else connected.queue.model_dump(),
        "memory": None
        if connected is None or connected.memory is None
        else connected.memory.model_dump(),
        "power": None if connected is None else connected.power,
        "models": lines(enrolled, connected, organisation, platform),
    }


def pinned_off(report: Report) -> bool | None:
    """Whether the worker's own settings have it off; None: it can't be told to, or never said."""
    if SETTING not in report.capabilities or report.settings is None:
        return None
    return report.settings.speculative_decoding == "off"


def report_of(enrolled: Enrolled, connected: Connected | None) -> Report:
    return enrolled.report if connected is None else connected.report
