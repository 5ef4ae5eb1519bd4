"""What the gateway keeps: in one file, of one organisation each, and whole after a crash."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mlx_worker.errors import BadValue, ConfigError, LastOwnerKey, NameTaken, NotFound, StoreFailed
from mlx_worker.gateway.database import MIGRATIONS
from mlx_worker.gateway.records import Report
from mlx_worker.gateway.store import RESTARTED, SESSION_S, Store, UsageFilter
from mlx_worker.records import Settings
from mlx_worker.wire.link import ModelReport
from tests.gateway.office import Clock

NASTY = ["'; DROP TABLE keys; --", '" OR 1=1 --', "x' UNION SELECT digest FROM keys --", "%", "\\"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path / "gateway.db", clock)
    yield store
    await store.close()


async def row(store: Store, organisation_id: str, **values: Any) -> int:
    given: dict[str, Any] = {
        "request_id": "r",
        "organisation_id": organisation_id,
        "key_id": "k",
        "key_name": "a key",
        "model": "demo",
        "endpoint": "chat",
        "is_streamed": False,
    }
    return await store.begin_usage(**{**given, **values})


def files_in(folder: Path) -> list[Path]:
    return list(folder.glob("gateway.db*"))


# --- the file ---------------------------------------------------------------------------------


async def test_only_its_owner_reads_the_file(store: Store, tmp_path: Path):
    """Neither it nor what SQLite puts beside it."""
    await store.add_organisation("acme")
    modes = {path.name: path.stat().st_mode & 0o777 for path in files_in(tmp_path)}
    assert modes == {"gateway.db": 0o600, "gateway.db-wal": 0o600, "gateway.db-shm": 0o600}


async def test_what_was_kept_is_there_when_it_is_opened_again(tmp_path: Path):
    """With its schema, of which no version is made twice."""
    store = await Store.open(tmp_path / "a.db")
    made = await store.add_organisation("acme")
    await store.close()
    store = await Store.open(tmp_path / "a.db")
    assert await store.organisations() == [made]
    await store.close()


async def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path):
    """Both numbers are said."""
    with sqlite3.connect(tmp_path / "a.db") as file:
        file.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    file.close()
    with pytest.raises(ConfigError, match=f"version {len(MIGRATIONS) + 1}"):
        await Store.open(tmp_path / "a.db")


@pytest.mark.parametrize("kind", ["folder", "text"])
async def test_what_is_no_database_is_a_config_error(tmp_path: Path, kind: str):
    """With the flag that names another."""
    path = tmp_path / "a.db"
    if kind == "folder":
        await asyncio.to_thread(path.mkdir)
    else:
        await asyncio.to_thread(path.write_text, "no database " * 1000)
    with pytest.raises(ConfigError, match="--database"):
        await Store.open(path)


async def test_a_change_is_ended_though_its_caller_is_cancelled(store: Store):
    """The next change finds the writer free, and the row whole."""
    task = asyncio.create_task(store.add_organisation("acme"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await store.add_organisation("other")
    assert "other" in [one.name for one in await store.organisations()]


async def test_changes_at_once_are_all_kept(store: Store):
    """One writer, many who ask."""
    one = await store.add_organisation("acme")
    await asyncio.gather(*(row(store, one.id) for _ in range(50)))
    found, _ = await store.usage(one.id, limit=100)
    assert len({each.id for each in found}) == 50


WRITER = """
import asyncio, sys
from pathlib import Path
from mlx_worker.gateway.store import Store

async def main():
    store = await Store.open(Path(sys.argv[1]))
    for n in range(40):
        await store.note(None, sys.argv[2], "test", str(n), "")
    await store.close()

asyncio.run(main())
"""


async def test_two_processes_write_at_once(store: Store, tmp_path: Path):
    """Neither is told that the file is locked, and every row is there."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "gateway.db")]
    running = [await asyncio.create_subprocess_exec(*command, name) for name in ("a", "b")]
    for n in range(40):
        await store.note(None, "here", "test", str(n), "")
    assert [await one.wait() for one in running] == [0, 0]
    found, _ = await store.audit(None, limit=1000)
    assert sorted(entry.actor for entry in found) == ["a"] * 40 + ["b"] * 40 + ["here"] * 40


KILLED = """
import asyncio, sys
from pathlib import Path
from mlx_worker.gateway.store import Store

async def main():
    store = await Store.open(Path(sys.argv[1]))
    one = await store.add_organisation("acme")
    for n in range(3):
        id = await store.begin_usage(request_id=str(n), organisation_id=one.id, key_id="k",
            key_name="n", model="m", endpoint="chat", is_streamed=True)
        if n == 0:
            await store.end_usage(id, prompt_tokens=7, finish_reason="stop")
    print(one.id, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_rows_that_a_killed_gateway_left_are_ended(tmp_path: Path):
    """Those that had ended are as they were."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "a.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        id = process.stdout.readline().strip()
        os.kill(process.pid, signal.SIGKILL)

    async def look() -> tuple[int, list[Any]]:
        store = await Store.open(tmp_path / "a.db")
        n_left = await store.end_abandoned()
        found, _ = await store.usage(id)
        await store.close()
        return n_left, found

    n_left, found = asyncio.run(look())
    assert n_left == 2
    assert [one.error for one in found] == [RESTARTED, RESTARTED, None]
    assert all(one.ended_s for one in found)
    assert found[2].prompt_tokens == 7


async def test_a_closed_store_says_so(tmp_path: Path):
    """In our own words, as any failure of the file."""
    store = await Store.open(tmp_path / "a.db")
    await store.close()
    with pytest.raises(StoreFailed):
        await store.organisations()
    with pytest.raises(StoreFailed):
        await store.add_organisation("acme")


# --- keys, sessions ---------------------------------------------------------------------------


async def test_no_secret_is_in_the_files(store: Store, tmp_path: Path):
    """Of keys, workers' keys and sessions there are digests alone."""
    one = await store.add_organisation("acme")
    key, secret = await store.add_key(one.id, "me", "owner")
    _, worker_key = await store.add_worker(one.id, "mac")
    token = await store.begin_session(key.id)
    kept = b"".join(path.read_bytes() for path in files_in(tmp_path))
    assert b"acme" in kept
    for text in (secret, worker_key, token):
        assert text[8:].encode() not in kept


async def test_kinds_of_keys_are_not_interchangeable(store: Store):
    """Each opens its own door alone, whatever prefix it is given."""
    one = await store.add_organisation("acme")
    key, secret = await store.add_key(one.id, "me")
    platform, platform_secret = await store.add_key(None, "us")
    worker, worker_key = await store.add_worker(one.id, "mac")
    assert await store.key_of(secret) == key
    assert await store.key_of(platform_secret) == platform
    found = await store.worker_of(worker_key)
    assert found is not None
    assert found.id == worker.id
    for other in (worker_key, secret.replace("mwk_", "mwp_"), secret + "x", secret.upper(), ""):
        assert await store.key_of(other) is None
    for other in (secret, platform_secret, worker_key.replace(worker.id, "0" * 16)):
        assert await store.worker_of(other) is None


async def test_a_revoked_key_opens_nothing(store: Store):
    """Nor does a session that was begun with it."""
    one = await store.add_organisation("acme")
    key, secret = await store.add_key(one.id, "me")
    token = await store.begin_session(key.id)
    await store.revoke_key(one.id, key.id)
    assert await store.key_of(secret) is None
    assert await store.key_of_session(token) is None
    assert await store.keys(one.id) == []
    with pytest.raises(NotFound):
        await store.revoke_key(one.id, key.id)


async def test_the_last_owners_key_stays(store: Store):
    """A member's key is none, and another organisation's doesn't count."""
    one, two = await store.add_organisation("acme"), await store.add_organisation("other")
    await store.add_key(two.id, "theirs", "owner")
    await store.add_key(one.id, "member")
    first, _ = await store.add_key(one.id, "first", "owner")
    with pytest.raises(LastOwnerKey, match="create another"):
        await store.revoke_key(one.id, first.id)
    await store.add_key(one.id, "second", "owner")
    assert (await store.revoke_key(one.id, first.id)).id == first.id


async def test_a_key_of_another_organisation_is_not_found(store: Store):
    """It stays what it was."""
    one, two = await store.add_organisation("acme"), await store.add_organisation("other")
    key, secret = await store.add_key(two.id, "theirs")
    with pytest.raises(NotFound):
        await store.revoke_key(one.id, key.id)
    assert await store.key_of(secret) == key


async def test_a_session_ends_after_its_time(store: Store, clock: Clock):
    """To the second; and when it is ended."""
    one = await store.add_organisation("acme")
    key, _ = await store.add_key(one.id, "me")
    token, other = await store.begin_session(key.id), await store.begin_session(key.id)
    await store.end_session(other)
    assert await store.key_of_session(other) is None
    clock.now_s += SESSION_S - 1
    assert await store.key_of_session(token) == key
    clock.now_s += 1
    assert await store.key_of_session(token) is None


# --- organisations, workers, the platform -----------------------------------------------------


async def test_a_name_is_an_organisations_alone(store: Store):
    """As a person tells them apart by it."""
    await store.add_organisation("acme")
    with pytest.raises(NameTaken):
        await store.add_organisation("acme")


async def test_workers_are_seen_by_their_organisation_alone(store: Store):
    """Lists, single ones, and disabling."""
    one, two = await store.add_organisation("acme"), await store.add_organisation("other")
    mine, _ = await store.add_worker(one.id, "mac")
    assert [each.id for each in await store.workers(one.id)] == [mine.id]
    assert await store.workers(two.id) == []
    assert await store.worker(two.id, mine.id) is None
    with pytest.raises(NotFound):
        await store.disable_worker(two.id, mine.id)
    assert await store.worker(one.id, mine.id) is not None


async def test_a_disabled_worker_is_known_by_its_key_alone(store: Store):
    """So that its connection is closed with the true reason."""
    one = await store.add_organisation("acme")
    worker, key = await store.add_worker(one.id, "mac")
    await store.disable_worker(one.id, worker.id)
    assert (await store.workers(one.id), await store.worker(None, worker.id)) == ([], None)
    found = await store.worker_of(key)
    assert found is not None
    assert found.disabled_s is not None
    assert await store.disabled() == {worker.id}


async def test_a_report_comes_back_as_it_was(store: Store, clock: Clock):
    """All of it, and when the worker was last there."""
    one = await store.add_organisation("acme")
    worker, _ = await store.add_worker(one.id, "mac")
    model = ModelReport(id="demo", draft="d", speculation=None)
    said = Report("1.0", frozenset({"a", "b"}), Settings("off", False, True), 7, "why", (model,))
    clock.now_s += 60
    await store.keep_report(worker.id, said)
    found = await store.worker(one.id, worker.id)
    assert found is not None
    assert (found.report, found.seen_s) == (said, clock.now_s)


async def test_a_change_is_pending_until_its_revision_is_there(store: Store):
    """An older acknowledgement doesn't end a newer change."""
    one = await store.add_organisation("acme")
    worker, _ = await store.add_worker(one.id, "mac")
    await store.keep_pending(worker.id, {"kv_prefix_cache": False}, 5)
    await store.clear_pending(worker.id, 4)
    found = await store.worker(one.id, worker.id)
    assert found is not None
    assert (found.pending, found.pending_revision) == ({"kv_prefix_cache": False}, 5)
    await store.clear_pending(worker.id, 5)
    found = await store.worker(one.id, worker.id)
    assert found is not None
    assert found.pending == {}


async def offs(store: Store, organisation_id: str) -> list[bool]:
    return [one.is_off_by_platform for one in await store.workers(organisation_id)]


async def test_the_platform_switches_all_or_some(store: Store):
    """Some on while all are off: the others stay off, new ones too, until all are on."""
    one = await store.add_organisation("acme")
    ids = [(await store.add_worker(one.id, name))[0].id for name in "ab"]
    assert (await store.switch_platform("off", [ids[0]])).speculative_decoding == "auto"
    assert await offs(store, one.id) == [True, False]
    assert (await store.switch_platform("off")).speculative_decoding == "off"
    state = await store.switch_platform("auto", [ids[1]])
    await store.add_worker(one.id, "c")
    assert (state.speculative_decoding, state.revision) == ("auto", 3)
    assert await offs(store, one.id) == [True, False, True]
    await store.switch_platform("auto")
    await store.add_worker(one.id, "d")
    assert await offs(store, one.id) == [False] * 4


async def test_a_switch_with_an_unknown_worker_changes_nothing(store: Store):
    """It is one transaction."""
    one = await store.add_organisation("acme")
    worker, _ = await store.add_worker(one.id, "mac")
    with pytest.raises(BadValue):
        await store.switch_platform("off", [worker.id, "0" * 16])
    assert await offs(store, one.id) == [False]
    assert (await store.platform()).revision == 0


async def test_a_name_or_availability_is_a_new_revision(store: Store):
    """Workers obey only a higher one; the same name again is none."""
    one = await store.add_organisation("acme")
    await store.set_display_name("Ours")
    await store.set_display_name("Ours")
    assert ((await store.platform()).revision, (await store.platform()).display_name) == (1, "Ours")
    await store.offer_speculation(one.id, False)
    assert (await store.platform()).revision == 2
    found = await store.organisation(one.id)
    assert found is not None
    assert not found.is_speculation_available
    with pytest.raises(NotFound):
        await store.offer_speculation("0" * 16, False)


# --- usage ------------------------------------------------------------------------------------


async def test_usage_is_filtered_and_paged(store: Store, clock: Clock):
    """By each filter; pages neither lose nor double a row while new ones come."""
    one, two = await store.add_organisation("acme"), await store.add_organisation("other")
    await row(store, two.id)
    ids = []
    for n in range(5):
        clock.now_s = 1000.0 + n
        id = await row(store, one.id, model=f"m{n % 2}", worker_id="w" if n < 2 else None)
        ids.append(id)
        await store.end_usage(id, error="overloaded" if n == 4 else None)

    async def found(**values: Any) -> list[int]:
        rows, _ = await store.usage(one.id, UsageFilter(**values))
        return [ids.index(each.id) for each in rows]

    assert await found() == [4, 3, 2, 1, 0]
    assert await found(model="m1") == [3, 1]
    assert await found(worker="w") == [1, 0]
    assert await found(since_s=1001, until_s=1003) == [2, 1]
    assert await found(error="any") == [4]
    assert await found(error="none", model="m0") == [2, 0]
    assert await found(error="overloaded", key="k") == [4]
    assert await found(key="another") == []
    first, cursor = await store.usage(one.id, limit=2)
    await row(store, one.id)
    second, cursor = await store.usage(one.id, cursor=cursor, limit=3)
    assert [ids.index(each.id) for each in (*first, *second)] == [4, 3, 2, 1, 0]
    assert cursor is None


async def test_a_row_ends_once(store: Store):
    """Whatever comes later of a request that was given up."""
    one = await store.add_organisation("acme")
    id = await row(store, one.id)
    await store.end_usage(id, error="worker_lost")
    await store.end_usage(id, error=None, finish_reason="stop")
    [found], _ = await store.usage(one.id)
    assert (found.error, found.finish_reason) == ("worker_lost", None)


# --- what clients may write -------------------------------------------------------------------


@pytest.mark.parametrize("text", NASTY)
async def test_sql_in_a_text_stays_a_text(store: Store, text: str):
    """In every parameter that takes one."""
    one = await store.add_organisation(text)
    key, secret = await store.add_key(one.id, text, "owner")
    worker, _ = await store.add_worker(one.id, text)
    await row(store, one.id, model=text, request_id=text, key_name=text)
    await store.note(one.id, text, text, text, text)
    await store.keep_pending(worker.id, {text: text}, 1)
    await store.set_display_name(text)
    assert await store.key_of(text) is None
    assert await store.key_of_session(text) is None
    assert await store.worker_of(text) is None
    assert await store.worker(text, text) is None
    assert await store.organisation(text) is None
    assert await store.keys(text) == []
    for one_filter in (UsageFilter(worker=text), UsageFilter(key=text), UsageFilter(error=text)):
        assert await store.usage(one.id, one_filter) == ([], None)
    [found], _ = await store.usage(one.id, UsageFilter(model=text))
    assert (found.model, found.key_name) == (text, text)
    assert await store.key_of(secret) == key
    assert [each.name for each in await store.organisations()] == [text]
