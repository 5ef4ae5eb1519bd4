"""Rows of the database ↔ the records of records.py. Pure; any thread."""

import json
import sqlite3
from dataclasses import asdict, fields

from mlx_worker.gateway.records import (
    AuditEntry,
    Enrolled,
    Key,
    Organisation,
    PlatformState,
    Report,
    UsageRow,
)
from mlx_worker.records import PLATFORM, Settings
from mlx_worker.wire.link import ModelReport

USAGE_COLUMNS = frozenset(field.name for field in fields(UsageRow))


def organisation(row: sqlite3.Row) -> Organisation:
    is_available = bool(row["is_speculation_available"])
    return Organisation(row["id"], row["name"], row["created_s"], is_available)


def key(row: sqlite3.Row) -> Key:
    names = [field.name for field in fields(Key)]
    return Key(**{**{n: row[n] for n in names}, "extra": frozenset(json.loads(row["extra"]))})


def enrolled(row: sqlite3.Row) -> Enrolled:
    values = {field.name: row[field.name] for field in fields(Enrolled)}
    values["is_off_by_platform"] = bool(row["is_off_by_platform"])
    values["report"] = report(row["report"])
    values["pending"] = json.loads(row["pending"])
    return Enrolled(**values)


def report(text: str) -> Report:
    """What was kept of a worker's own words, which were checked when they came."""
    values = json.loads(text)
    if not values:
        return Report()
    values["capabilities"] = frozenset(values["capabilities"])
    values["settings"] = Settings(**values["settings"]) if values["settings"] else None
    values["models"] = tuple(ModelReport.model_validate(one) for one in values["models"])
    return Report(**values)


def report_text(report: Report) -> str:
    values = {field.name: getattr(report, field.name) for field in fields(Report)}
    values["capabilities"] = sorted(report.capabilities)
    values["settings"] = asdict(report.settings) if report.settings else None
    values["models"] = [one.model_dump(mode="json") for one in report.models]
    return json.dumps(values)


def usage(row: sqlite3.Row) -> UsageRow:
    values = {name: row[name] for name in USAGE_COLUMNS}
    return UsageRow(**{**values, "is_streamed": bool(row["is_streamed"])})


def platform(row: sqlite3.Row) -> PlatformState:
    name = row["display_name"] or PLATFORM
    return PlatformState(row["revision"], row["speculative_decoding"], name)


def audit(row: sqlite3.Row) -> AuditEntry:
    return AuditEntry(**{field.name: row[field.name] for field in fields(AuditEntry)})
