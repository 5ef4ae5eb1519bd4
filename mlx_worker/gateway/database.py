"""The gateway's SQLite file: its form, and how it is read and changed by several at once.

Owns the schema with its versions, the two connections (one that reads, one that writes), and what
one transaction is. Leaves what is asked to store.py. Event loop; SQLite works in aiosqlite's
threads.

Write-ahead logging lets other processes, such as the command line, read and write meanwhile. A
change that was begun is ended even if whoever asked for it has gone.
"""

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite

from mlx_worker.errors import ConfigError, StoreFailed

BUSY_S = 10.0  # that a statement waits for another process's change
T = TypeVar("T")
Row = sqlite3.Row
Work = Callable[[aiosqlite.Connection], Awaitable[T]]

MIGRATIONS = (  # each makes one version from the one before; none of them is ever changed
    """
    CREATE TABLE organisations (
      id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, created_s REAL NOT NULL,
      is_speculation_available INTEGER NOT NULL DEFAULT 1
    ) STRICT;
    CREATE TABLE keys (
      id TEXT PRIMARY KEY, organisation_id TEXT REFERENCES organisations (id), name TEXT NOT NULL,
      role TEXT NOT NULL, extra TEXT NOT NULL, hint TEXT NOT NULL, digest TEXT NOT NULL UNIQUE,
      created_s REAL NOT NULL, revoked_s REAL
    ) STRICT;
    CREATE TABLE workers (
      id TEXT PRIMARY KEY, organisation_id TEXT NOT NULL REFERENCES organisations (id),
      name TEXT NOT NULL, hint TEXT NOT NULL, digest TEXT NOT NULL UNIQUE,
      created_s REAL NOT NULL, disabled_s REAL, is_off_by_platform INTEGER NOT NULL DEFAULT 0,
      report TEXT NOT NULL DEFAULT '{}', pending TEXT NOT NULL DEFAULT '{}',
      pending_revision INTEGER NOT NULL DEFAULT 0, seen_s REAL
    ) STRICT;
    CREATE TABLE sessions (
      digest TEXT PRIMARY KEY, key_id TEXT NOT NULL REFERENCES keys (id), ends_s REAL NOT NULL
    ) STRICT;
    CREATE TABLE usage (
      id INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL, at_s REAL NOT NULL,
      organisation_id TEXT NOT NULL REFERENCES organisations (id), key_id TEXT NOT NULL,
      key_name TEXT NOT NULL, model TEXT NOT NULL, endpoint TEXT NOT NULL,
      is_streamed INTEGER NOT NULL, worker_id TEXT, worker_name TEXT, prompt_tokens INTEGER,
      completion_tokens INTEGER, ttft_ms REAL, tokens_per_second REAL, draft_acceptance_rate REAL,
      finish_reason TEXT, error TEXT, ended_s REAL
    ) STRICT;
    CREATE INDEX usage_of ON usage (organisation_id, id);
    CREATE INDEX usage_open ON usage (id) WHERE ended_s IS NULL;
    CREATE TABLE platform (
      id INTEGER PRIMARY KEY CHECK (id = 1), revision INTEGER NOT NULL,
      speculative_decoding TEXT NOT NULL, display_name TEXT,
      is_off_for_new INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    INSERT INTO platform (id, revision, speculative_decoding) VALUES (1, 0, 'auto');
    CREATE TABLE audit (
      id INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, organisation_id TEXT,
      actor TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL, details TEXT NOT NULL
    ) STRICT;
    CREATE INDEX audit_of ON audit (organisation_id, id);
    """,
    "ALTER TABLE platform ADD COLUMN link_url TEXT",
)


class Database:
    """An open file. Next: close() it."""

    def __init__(self, reader: aiosqlite.Connection, writer: aiosqlite.Connection) -> None:
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()  # one transaction at a time on the writer's connection
        self._begun: set[asyncio.Task[Any]] = set()

    @classmethod
    async def open(cls, path: Path) -> "Database":
        """Raises ConfigError: it can't be made or read, or is of a newer version."""
        try:
            await asyncio.to_thread(_make, path)
            writer = await _connect(path)
            try:
                await _migrate(writer, path)
                reader = await _connect(path, "PRAGMA query_only = ON")
            except BaseException:
                await writer.close()
                raise
        except OSError as error:
            raise _unusable(path, error.strerror or str(error)) from None
        except sqlite3.Error as error:
            raise _unusable(path, str(error)) from None
        return cls(reader, writer)

    async def close(self) -> None:
        """After what was begun."""
        while self._begun:
            await asyncio.wait(self._begun)
        await self._reader.close()
        await self._writer.close()

    async def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """Raises StoreFailed, as all below do."""
        try:
            return list(await self._reader.execute_fetchall(sql, values))
        except (sqlite3.Error, ValueError) as error:
            raise StoreFailed(str(error)) from None

    async def row(self, sql: str, values: Sequence[Any] = ()) -> Row | None:
        found = await self.rows(sql, values)
        return found[0] if found else None

    async def write(self, sql: str, values: Sequence[Any] = ()) -> int:
        """One statement; how many rows it changed."""

        async def work(connection: aiosqlite.Connection) -> int:
            async with connection.execute(sql, values) as cursor:
                return cursor.rowcount

        return await self.change(work)

    async def insert(self, table: str, values: dict[str, Any]) -> int:
        """A row; its number. Names of the table and its columns are ours, never a client's."""
        marks = ", ".join("?" for _ in values)
        sql = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})"

        async def work(connection: aiosqlite.Connection) -> int:
            async with connection.execute(sql, tuple(values.values())) as cursor:
                return cursor.lastrowid or 0

        return await self.change(work)

    async def change(self, work: Work[T]) -> T:
        """One transaction, whole or not at all, and ended even if the caller is cancelled."""
        task = asyncio.create_task(self._transact(work))
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return await asyncio.shield(task)

    async def _transact(self, work: Work[T]) -> T:
        async with self._turn:
            try:
                await self._writer.execute_fetchall("BEGIN IMMEDIATE")
                try:
                    result = await work(self._writer)
                except BaseException:
                    await self._writer.execute_fetchall("ROLLBACK")
                    raise
                await self._writer.execute_fetchall("COMMIT")
            except sqlite3.IntegrityError:
                raise
            except (sqlite3.Error, ValueError) as error:
                raise StoreFailed(str(error)) from None
        return result


def _make(path: Path) -> None:
    """An empty file that only its owner reads; SQLite gives the files beside it the same mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


async def _connect(path: Path, *more: str) -> aiosqlite.Connection:
    connection = await aiosqlite.connect(path, timeout=BUSY_S, isolation_level=None)
    connection.row_factory = Row
    settings = ("PRAGMA journal_mode = WAL", "PRAGMA foreign_keys = ON")
    try:
        for line in (*settings, "PRAGMA synchronous = NORMAL", *more):
            await connection.execute_fetchall(line)
    except BaseException:
        await connection.close()
        raise
    return connection


async def _migrate(connection: aiosqlite.Connection, path: Path) -> None:
    """Bring the file to this version; of two processes, the second finds it done."""
    await connection.execute_fetchall("BEGIN IMMEDIATE")
    try:
        [[version]] = await connection.execute_fetchall("PRAGMA user_version")
        if version > len(MIGRATIONS):
            raise ConfigError(
                f"{path}: is of version {version}, this gateway knows {len(MIGRATIONS)}",
                hint="update mlx-worker, or name another file with --database",
            )
        for script in MIGRATIONS[version:]:
            for statement in _statements(script):
                await connection.execute_fetchall(statement)
        await connection.execute_fetchall(f"PRAGMA user_version = {len(MIGRATIONS)}")
    except BaseException:
        await connection.execute_fetchall("ROLLBACK")
        raise
    await connection.execute_fetchall("COMMIT")


def _statements(script: str) -> Iterable[str]:
    """One by one: SQLite's own way to run a script would end the transaction."""
    return (one for one in script.split(";") if one.strip())


def _unusable(path: Path, what: str) -> ConfigError:
    hint = "name another file with --database"
    return ConfigError(f"{path}: can't be used as the gateway's database: {what}", hint=hint)
