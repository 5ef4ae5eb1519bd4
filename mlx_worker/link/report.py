"""What the engine says of itself → what the gateway is told: models, settings, memory, queue.

Owns which figures go, and that a name or a text which is too long for a frame stops nothing. Pure;
event loop.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from mlx_worker.wire.link import (
    MAX_MODELS,
    Memory,
    ModelReport,
    Queue,
    SettingsPart,
    StatusReport,
    speculation_part,
)

MOST_CHARS = 4000  # of a text that is shown

log = logging.getLogger(__name__)


def model_reports(
    status: Mapping[str, Any], hidden: Collection[str] = ()
) -> tuple[ModelReport, ...]:
    """Of Engine.status(). hidden: models that aren't offered to a gateway."""
    found = (_report(model) for model in status.get("models", ()) if model["id"] not in hidden)
    return tuple(report for report in found if report is not None)[:MAX_MODELS]


def _report(model: Mapping[str, Any]) -> ModelReport | None:
    problem = model.get("draft_problem")
    try:
        return ModelReport(
            id=model["id"],
            is_loaded=model.get("is_loaded", False),
            context_tokens=model.get("context_limit"),
            model_bytes=model.get("target_bytes"),
            draft=model.get("draft"),
            draft_bytes=model.get("draft_bytes"),
            draft_problem=problem and problem[:MOST_CHARS],
            speculation=speculation_part(model.get("measured")),
        )
    except ValidationError:
        log.exception("a model can't be offered to the gateway")
        return None


def settings_fields(status: Mapping[str, Any]) -> dict[str, Any]:
    """Those of Hello and of StatusReport."""
    problem = status.get("settings_problem")
    return {
        "settings": SettingsPart(**status.get("settings", {})),
        "settings_revision": status.get("settings_revision", 0),
        "settings_problem": problem and problem[:MOST_CHARS],
    }


def status_report(
    status: Mapping[str, Any], budget_bytes: int | None, hidden: Collection[str] = ()
) -> StatusReport:
    memory, queue = status.get("memory", {}), status.get("queue", {})
    power = status.get("power", {})
    return StatusReport(
        models=model_reports(status, hidden),
        **settings_fields(status),
        platform_revision=status.get("platform", {}).get("revision", 0),
        memory=Memory(
            active_bytes=memory.get("active_bytes", 0),
            peak_bytes=memory.get("peak_bytes", 0),
            budget_bytes=budget_bytes,
        ),
        queue=Queue(
            running=queue.get("running", 0),
            waiting=queue.get("waiting", 0),
            limit=queue.get("limit", 0),
        ),
        is_on_battery=power.get("is_on_battery"),
        thermal=power.get("thermal"),
        is_low_power=power.get("is_low_power"),
    )


def is_news(report: StatusReport, last: StatusReport | None) -> bool:
    """Whether anything else than the memory in use has changed."""
    return last is None or report.model_copy(update={"memory": last.memory}) != last
