"""What the gateway keeps: organisations, keys, workers, sessions, usage, the platform, the audit.

Owns every question to the database. Each takes the organisation that asks, and finds nothing of
another's. Leaves the file to database.py, who may ask to auth.py. Event loop.

All values go to SQLite as parameters. Of a key only its digest is kept; it is found by that, and
then compared in constant time.
"""

import hmac
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiosqlite

from mlx_worker.errors import BadValue, LastOwnerKey, NameTaken, NotFound, shown
from mlx_worker.gateway import credentials, rows
from mlx_worker.gateway.database import Database, Row
from mlx_worker.gateway.records import (
    PERMISSIONS,
    AuditEntry,
    Enrolled,
    Key,
    Organisation,
    Permission,
    PlatformState,
    Report,
    Role,
    UsageRow,
)

SESSION_S = 12 * 3600.0  # that a console's session lasts
MOST_ROWS = 1000  # of a page of usage or audit
RESTARTED = "gateway_restarted"  # the error of requests that a killed gateway left
Clock = Callable[[], float]


@dataclass(frozen=True)
class UsageFilter:
    """Which rows of usage; None: any.

    error  a code; "any": only rows with an error; "none": only those without
    """

    worker: str | None = None
    key: str | None = None
    model: str | None = None
    since_s: float | None = None
    until_s: float | None = None
    error: str | None = None


class Store:
    """The gateway's memory. Times come from now_s, in Unix seconds. Next: close() it."""

    def __init__(self, database: Database, now_s: Clock = time.time) -> None:
        self._database = database
        self._now_s = now_s

    @classmethod
    async def open(cls, path: Path, now_s: Clock = time.time) -> "Store":
        """Raises ConfigError for a file that can't be used."""
        return cls(await Database.open(path), now_s)

    async def close(self) -> None:
        await self._database.close()

    # --- organisations ------------------------------------------------------------------------

    async def add_organisation(self, name: str) -> Organisation:
        """Raises NameTaken."""
        found = Organisation(credentials.new_id(), name, self._now_s())
        values = {"id": found.id, "name": name, "created_s": found.created_s}
        try:
            await self._database.insert("organisations", values)
        except sqlite3.IntegrityError:
            raise NameTaken("organisation", name) from None
        return found

    async def organisations(self) -> list[Organisation]:
        """In the order in which they were added."""
        found = await self._database.rows("SELECT * FROM organisations ORDER BY created_s, rowid")
        return [rows.organisation(row) for row in found]

    async def organisation(self, id: str) -> Organisation | None:
        row = await self._database.row("SELECT * FROM organisations WHERE id = ?", (id,))
        return rows.organisation(row) if row else None

    async def offer_speculation(self, id: str, is_available: bool) -> None:
        """Whether the organisation sees drafting at all. Raises NotFound."""

        async def work(connection: aiosqlite.Connection) -> None:
            sql = "UPDATE organisations SET is_speculation_available = ? WHERE id = ?"
            async with connection.execute(sql, (is_available, id)) as cursor:
                if not cursor.rowcount:
                    raise NotFound("organisation", id)
            await connection.execute_fetchall("UPDATE platform SET revision = revision + 1")

        await self._database.change(work)

    # --- keys ---------------------------------------------------------------------------------

    async def add_key(
        self,
        organisation_id: str | None,
        name: str,
        role: Role = "member",
        extra: Iterable[Permission] = (),
    ) -> tuple[Key, str]:
        """The key and its secret, which is nowhere kept. organisation_id None: the platform's."""
        secret = credentials.new_key(is_platform=organisation_id is None)
        more = frozenset(extra)
        id, now_s, hint = credentials.new_id(), self._now_s(), credentials.hint(secret)
        values = {
            "id": id,
            "organisation_id": organisation_id,
            "name": name,
            "role": role,
            "extra": json.dumps([one for one in PERMISSIONS if one in more]),
            "hint": hint,
            "digest": credentials.digest(secret),
            "created_s": now_s,
        }
        await self._database.insert("keys", values)
        return Key(id, organisation_id, name, role, more, hint, now_s), secret

    async def keys(self, organisation_id: str | None) -> list[Key]:
        """Those of an organisation, or of the platform (None), that aren't revoked."""
        sql = (
            "SELECT * FROM keys WHERE organisation_id IS ? AND revoked_s IS NULL "
            "ORDER BY created_s, rowid"
        )
        return [rows.key(row) for row in await self._database.rows(sql, (organisation_id,))]

    async def is_valid(self, key_id: str) -> bool:
        """Whether the key is there, and not revoked."""
        sql = "SELECT 1 FROM keys WHERE id = ? AND revoked_s IS NULL"
        return await self._database.row(sql, (key_id,)) is not None

    async def revoke_key(self, organisation_id: str | None, id: str) -> Key:
        """Its sessions end with it. Raises NotFound, LastOwnerKey."""
        now_s = self._now_s()

        async def work(connection: aiosqlite.Connection) -> Key:
            mine = "organisation_id IS ? AND revoked_s IS NULL"
            found = await _first(
                connection, f"SELECT * FROM keys WHERE id = ? AND {mine}", (id, organisation_id)
            )
            if found is None:
                raise NotFound("key", id)
            key = rows.key(found)
            others = f"SELECT 1 FROM keys WHERE {mine} AND role = 'owner' AND id <> ? LIMIT 1"
            is_owner = key.role == "owner" and not key.is_platform
            if is_owner and await _first(connection, others, (organisation_id, id)) is None:
                raise LastOwnerKey(key.name)
            await connection.execute_fetchall(
                "UPDATE keys SET revoked_s = ? WHERE id = ?", (now_s, id)
            )
            await connection.execute_fetchall("DELETE FROM sessions WHERE key_id = ?", (id,))
            return key

        return await self._database.change(work)

    async def key_of(self, secret: str) -> Key | None:
        """The key with this secret, unless it was revoked; a worker's key is none."""
        if not credentials.is_key(secret):
            return None
        row = await self._by_digest("keys", credentials.digest(secret))
        key = rows.key(row) if row and row["revoked_s"] is None else None
        is_platform = secret.startswith(credentials.PLATFORM_KEY)
        return key if key and key.is_platform == is_platform else None

    async def _by_digest(self, table: Literal["keys", "workers"], digest: str) -> Row | None:
        row = await self._database.row(f"SELECT * FROM {table} WHERE digest = ?", (digest,))
        return row if row and hmac.compare_digest(row["digest"], digest) else None

    # --- workers ------------------------------------------------------------------------------

    async def add_worker(self, organisation_id: str, name: str) -> tuple[Enrolled, str]:
        """The worker and its key, which is nowhere kept."""
        id = credentials.new_id()
        secret = credentials.new_worker_key(id)
        now_s, hint = self._now_s(), credentials.hint(secret)
        sql = (
            "INSERT INTO workers (id, organisation_id, name, hint, digest, created_s, "
            "is_off_by_platform) SELECT ?, ?, ?, ?, ?, ?, is_off_for_new FROM platform"
        )
        values = (id, organisation_id, name, hint, credentials.digest(secret), now_s)
        await self._database.write(sql, values)
        found = await self.worker(organisation_id, id)
        assert found, "it was just added"
        return found, secret

    async def workers(self, organisation_id: str | None) -> list[Enrolled]:
        """Those that aren't disabled. organisation_id None: of all."""
        sql = (
            "SELECT * FROM workers WHERE (? IS NULL OR organisation_id = ?) "
            "AND disabled_s IS NULL ORDER BY created_s, rowid"
        )
        found = await self._database.rows(sql, (organisation_id, organisation_id))
        return [rows.enrolled(row) for row in found]

    async def worker(self, organisation_id: str | None, id: str) -> Enrolled | None:
        """None for one that is disabled, or another organisation's. organisation_id None: any."""
        sql = (
            "SELECT * FROM workers WHERE id = ? AND (? IS NULL OR organisation_id = ?) "
            "AND disabled_s IS NULL"
        )
        row = await self._database.row(sql, (id, organisation_id, organisation_id))
        return rows.enrolled(row) if row else None

    async def worker_of(self, secret: str) -> Enrolled | None:
        """The worker with this key, a disabled one too: look at disabled_s."""
        if not credentials.is_worker_key(secret):
            return None
        row = await self._by_digest("workers", credentials.digest(secret))
        return rows.enrolled(row) if row else None

    async def disable_worker(self, organisation_id: str, id: str) -> Enrolled:
        """Its key opens nothing any more. Raises NotFound."""
        found = await self.worker(organisation_id, id)
        if found is None:
            raise NotFound("worker", id)
        sql = "UPDATE workers SET disabled_s = ? WHERE id = ? AND organisation_id = ?"
        await self._database.write(sql, (self._now_s(), id, organisation_id))
        return found

    async def disabled(self) -> set[str]:
        """The ids of all that are."""
        found = await self._database.rows("SELECT id FROM workers WHERE disabled_s IS NOT NULL")
        return {row["id"] for row in found}

    async def keep_report(self, worker_id: str, report: Report) -> None:
        sql = "UPDATE workers SET report = ?, seen_s = ? WHERE id = ?"
        await self._database.write(sql, (rows.report_text(report), self._now_s(), worker_id))

    async def seen(self, worker_id: str) -> None:
        sql = "UPDATE workers SET seen_s = ? WHERE id = ?"
        await self._database.write(sql, (self._now_s(), worker_id))

    async def keep_pending(
        self, worker_id: str, changes: Mapping[str, object], revision: int
    ) -> None:
        """Changes of settings that the worker has yet to acknowledge."""
        sql = "UPDATE workers SET pending = ?, pending_revision = ? WHERE id = ?"
        await self._database.write(sql, (json.dumps(dict(changes)), revision, worker_id))

    async def clear_pending(self, worker_id: str, revision: int) -> None:
        """Forget what is pending, if it is of this revision or an older one."""
        sql = "UPDATE workers SET pending = '{}' WHERE id = ? AND pending_revision <= ?"
        await self._database.write(sql, (worker_id, revision))

    # --- sessions -----------------------------------------------------------------------------

    async def begin_session(self, key_id: str) -> str:
        """The token for the cookie; those that are over are forgotten."""
        token, now_s = credentials.new_token(), self._now_s()
        await self._database.write("DELETE FROM sessions WHERE ends_s <= ?", (now_s,))
        values = {
            "digest": credentials.digest(token),
            "key_id": key_id,
            "ends_s": now_s + SESSION_S,
        }
        await self._database.insert("sessions", values)
        return token

    async def key_of_session(self, token: str) -> Key | None:
        digest = credentials.digest(token)
        sql = (
            "SELECT keys.*, sessions.digest AS session FROM sessions "
            "JOIN keys ON keys.id = sessions.key_id "
            "WHERE sessions.digest = ? AND sessions.ends_s > ? AND keys.revoked_s IS NULL"
        )
        row = await self._database.row(sql, (digest, self._now_s()))
        return rows.key(row) if row and hmac.compare_digest(row["session"], digest) else None

    async def end_session(self, token: str) -> None:
        digest = credentials.digest(token)
        await self._database.write("DELETE FROM sessions WHERE digest = ?", (digest,))

    # --- usage --------------------------------------------------------------------------------

    async def begin_usage(
        self,
        *,
        request_id: str,
        organisation_id: str,
        key_id: str,
        key_name: str,
        model: str,
        endpoint: Literal["chat", "completion"],
        is_streamed: bool,
        worker_id: str | None = None,
        worker_name: str | None = None,
    ) -> int:
        """The row of a request that has just come. Next: end_usage."""
        values = {
            "request_id": request_id,
            "at_s": self._now_s(),
            "organisation_id": organisation_id,
            "key_id": key_id,
            "key_name": key_name,
            "model": model,
            "endpoint": endpoint,
            "is_streamed": is_streamed,
            "worker_id": worker_id,
            "worker_name": worker_name,
        }
        return await self._database.insert("usage", values)

    async def end_usage(self, id: int, **fields: object) -> None:
        """fields: of UsageRow, whatever is known by now. The second end of a row changes nothing.

        worker_id and worker_name may be given here, where it took long to find one.
        """
        unknown = fields.keys() - rows.USAGE_COLUMNS
        assert not unknown, unknown
        values = {"ended_s": self._now_s(), **fields}
        names = ", ".join(f"{name} = ?" for name in values)
        sql = f"UPDATE usage SET {names} WHERE id = ? AND ended_s IS NULL"
        await self._database.write(sql, (*values.values(), id))

    async def usage(
        self,
        organisation_id: str,
        filters: UsageFilter = UsageFilter(),
        cursor: int | None = None,
        limit: int = 100,
    ) -> tuple[list[UsageRow], int | None]:
        """The newest first; and the cursor of the next page, None: there is none.

        Rows that come meanwhile move no other to another page.
        """
        where, values = _where(filters)
        sql = f"SELECT * FROM usage WHERE {where} ORDER BY id DESC LIMIT ?"
        found = await self._page(sql, (organisation_id, *values), cursor, limit)
        return [rows.usage(row) for row in found[:limit]], _next(found, limit)

    async def _page(
        self, sql: str, values: Sequence[Any], cursor: int | None, limit: int
    ) -> list[Row]:
        """One row more than a page, if there is one."""
        assert 1 <= limit <= MOST_ROWS
        last = (1 << 63) - 1 if cursor is None else cursor
        return await self._database.rows(sql, (*values, last, limit + 1))

    async def end_abandoned(self) -> int:
        """End the rows that a killed gateway left begun; how many those were."""
        sql = "UPDATE usage SET ended_s = ?, error = ? WHERE ended_s IS NULL"
        return await self._database.write(sql, (self._now_s(), RESTARTED))

    # --- platform -----------------------------------------------------------------------------

    async def platform(self) -> PlatformState:
        row = await self._database.row("SELECT * FROM platform")
        assert row, "the first migration made it"
        return rows.platform(row)

    async def switch_platform(
        self, mode: Literal["auto", "off"], worker_ids: Sequence[str] | None = None
    ) -> PlatformState:
        """Drafting on all workers or on some. Raises BadValue for an id that is no worker's.

        All were off and some are switched on: the others stay off, new ones too.
        """

        async def work(connection: aiosqlite.Connection) -> None:
            if worker_ids is None:
                await _switch_all(connection, mode)
            else:
                await _switch_some(connection, mode, worker_ids)
            await connection.execute_fetchall("UPDATE platform SET revision = revision + 1")

        await self._database.change(work)
        return await self.platform()

    async def set_display_name(self, name: str) -> None:
        """What "Off (by …)" names; the same name again changes nothing."""
        sql = (
            "UPDATE platform SET display_name = ?, revision = revision + 1 "
            "WHERE display_name IS NOT ?"
        )
        await self._database.write(sql, (name, name))

    async def set_link_url(self, url: str) -> None:
        """By which a worker on this machine reaches the gateway that serves this database."""
        await self._database.write("UPDATE platform SET link_url = ?", (url,))

    async def link_url(self) -> str | None:
        """Of the gateway that serves it, or did so last; None: none ever did."""
        row = await self._database.row("SELECT link_url FROM platform")
        return row["link_url"] if row else None

    # --- audit --------------------------------------------------------------------------------

    async def note(
        self, organisation_id: str | None, actor: str, action: str, target: str, details: str
    ) -> None:
        values = {
            "at_s": self._now_s(),
            "organisation_id": organisation_id,
            "actor": actor,
            "action": action,
            "target": target,
            "details": details,
        }
        await self._database.insert("audit", values)

    async def audit(
        self, organisation_id: str | None, cursor: int | None = None, limit: int = 100
    ) -> tuple[list[AuditEntry], int | None]:
        """As usage(). None: what concerns no organisation."""
        sql = "SELECT * FROM audit WHERE organisation_id IS ? AND id < ? ORDER BY id DESC LIMIT ?"
        found = await self._page(sql, (organisation_id,), cursor, limit)
        return [rows.audit(row) for row in found[:limit]], _next(found, limit)


def _where(filters: UsageFilter) -> tuple[str, list[Any]]:
    """The condition, up to the page's own end, and the values of its marks."""
    tests = {
        "worker_id = ?": filters.worker,
        "key_id = ?": filters.key,
        "model = ?": filters.model,
        "at_s >= ?": filters.since_s,
        "at_s < ?": filters.until_s,
    }
    given = {test: value for test, value in tests.items() if value is not None}
    words = ["organisation_id = ?", *given]
    values = list(given.values())
    if filters.error in ("any", "none"):
        words.append(f"error IS {'NOT ' if filters.error == 'any' else ''}NULL")
    elif filters.error is not None:
        words.append("error = ?")
        values.append(filters.error)
    return " AND ".join([*words, "id < ?"]), values


def _next(found: Sequence[Row], limit: int) -> int | None:
    return found[limit - 1]["id"] if len(found) > limit else None


async def _first(
    connection: aiosqlite.Connection, sql: str, values: Sequence[Any] = ()
) -> Row | None:
    return next(iter(await connection.execute_fetchall(sql, values)), None)


async def _switch_all(connection: aiosqlite.Connection, mode: str) -> None:
    sql = "UPDATE platform SET speculative_decoding = ?, is_off_for_new = 0"
    await connection.execute_fetchall(sql, (mode,))
    if mode == "auto":
        await connection.execute_fetchall("UPDATE workers SET is_off_by_platform = 0")


async def _switch_some(
    connection: aiosqlite.Connection, mode: str, worker_ids: Sequence[str]
) -> None:
    row = await _first(connection, "SELECT speculative_decoding FROM platform")
    if mode == "auto" and row and row["speculative_decoding"] == "off":
        await connection.execute_fetchall("UPDATE workers SET is_off_by_platform = 1")
        sql = "UPDATE platform SET speculative_decoding = 'auto', is_off_for_new = 1"
        await connection.execute_fetchall(sql)
    for id in worker_ids:
        sql = "UPDATE workers SET is_off_by_platform = ? WHERE id = ? AND disabled_s IS NULL"
        async with connection.execute(sql, (mode == "off", id)) as cursor:
            if not cursor.rowcount:
                raise BadValue(f"workers: {shown(id)}, is no worker", param="workers")
