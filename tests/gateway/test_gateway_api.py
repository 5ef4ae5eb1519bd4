"""The management API: what it answers, what it refuses and in which order, what it keeps."""

import csv
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mlx_worker.gateway.store import Store
from mlx_worker.wire.link import Close
from tests.gateway.office import NEW, OLD, Clock, Office, enrol, opened

NASTY = ["'; DROP TABLE keys; --", '" OR 1=1 --', "1 UNION SELECT digest FROM keys"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def office(tmp_path: Path, clock: Clock) -> AsyncIterator[Office]:
    async with opened(tmp_path, now_s=clock) as office:
        yield office


async def row(office: Office, **values: Any) -> int:
    given: dict[str, Any] = {
        "request_id": "r",
        "organisation_id": office.organisation.id,
        "key_id": office.owner.id,
        "key_name": "boss",
        "model": "demo",
        "endpoint": "chat",
        "is_streamed": False,
    }
    return await office.store.begin_usage(**{**given, **values})


async def actions(office: Office, organisation_id: str | None = "own") -> list[tuple[str, str]]:
    id = office.organisation.id if organisation_id == "own" else organisation_id
    found, _ = await office.store.audit(id)
    return [(entry.action, entry.details) for entry in found]


# --- who one is -------------------------------------------------------------------------------


async def test_me_says_whose_key_it_is(office: Office):
    """Organisation, key, and all that it may do."""
    found = (await office.get("/api/v1/me")).json()
    assert found == {
        "organisation": {
            "id": office.organisation.id, "name": "acme", "is_speculation_available": True,
        },
        "key": {
            "id": office.owner.id, "name": "boss", "role": "owner", "hint": office.secret[:8],
        },
        "permissions": [
            "inference", "view_workers", "manage_workers", "view_usage", "manage_keys",
        ],
        "display_name": "Pendra",
    }  # fmt: skip


# --- workers ----------------------------------------------------------------------------------


async def test_workers_are_listed_with_what_they_said(office: Office):
    """One that is here, one that never was."""
    await enrol(office.store, office.fleet, office.organisation.id, "away", None)
    here, away = (await office.get("/api/v1/workers")).json()["data"]
    assert (here["name"], here["version"], here["connected"]) == ("mac", "1.0", True)
    assert here["speculative_pinned_off"] is False
    assert here["takes"] == {
        "speculative_decoding": True, "kv_prefix_cache": True, "run_requests_together": True,
    }  # fmt: skip
    assert (away["version"], away["connected"], away["seen"]) == (None, False, None)
    assert (away["settings"], away["speculative_pinned_off"]) == (None, None)
    one = (await office.get(f"/api/v1/workers/{office.worker.id}")).json()
    assert one == here


async def test_a_workers_key_is_shown_once(office: Office):
    """When it is added; it opens the link, and no other reply has it."""
    added = await office.ask("POST", "/api/v1/workers", {"name": " new "})
    secret = added.json()["key"]
    found = await office.store.worker_of(secret)
    assert (added.status, added.json()["name"]) == (201, "new")
    assert found is not None
    assert found.id == added.json()["id"]
    assert secret[8:].encode() not in (await office.get("/api/v1/workers")).body
    assert await actions(office) == [("worker.add", "new")]


async def test_a_disabled_worker_is_gone_and_hung_up_on(office: Office):
    """With the close code that says so."""
    path = f"/api/v1/workers/{office.worker.id}"
    assert (await office.ask("DELETE", path)).status == 204
    assert office.fleet.closed == [(office.worker.id, Close.DISABLED)]
    assert (await office.get(path)).status == (await office.ask("DELETE", path)).status == 404
    assert await actions(office) == [("worker.disable", "mac")]


@pytest.mark.parametrize("mode", ["auto", "off"])
async def test_speculative_decoding_is_switched(office: Office, mode: str):
    """202: sent, with its revision; who did it is kept."""
    path = f"/api/v1/workers/{office.worker.id}/speculative-decoding"
    reply = await office.ask("PATCH", path, {"mode": mode})
    assert (reply.status, reply.json()) == (202, {"revision": 1})
    assert office.fleet.changed == [(office.worker.id, {"speculative_decoding": mode})]
    [entry], _ = await office.store.audit(office.organisation.id)
    assert entry.actor == f"boss ({office.owner.id})"
    assert (entry.action, entry.target) == ("worker.settings", office.worker.id)
    assert entry.details == f"speculative_decoding: {mode}"


async def test_other_settings_are_changed(office: Office):
    """One or both; those that aren't named stay."""
    path = f"/api/v1/workers/{office.worker.id}/settings"
    for body in (
        {"kv_prefix_cache": False},
        {"kv_prefix_cache": True, "run_requests_together": True},
    ):
        assert (await office.ask("PATCH", path, body)).status == 202
    assert [changes for _, changes in office.fleet.changed] == [
        {"kv_prefix_cache": False}, {"kv_prefix_cache": True, "run_requests_together": True},
    ]  # fmt: skip
    assert (await actions(office))[0][1] == "kv_prefix_cache: on, run_requests_together: on"


@pytest.mark.parametrize(
    "body",
    [
        {}, {"mode": "on"}, {"mode": None}, {"mode": True}, {"mode": ["off"]},
        {"mode": "off", "x": 1}, [], None, "off", b"{", b"", b"\xff", b'{"mode": NaN}', b"[" * 5000,
    ],
    ids=lambda body: str(body)[:20],
)  # fmt: skip
async def test_what_no_mode_can_be_is_422(office: Office, body: Any):
    """Nothing is sent, nothing noted."""
    sent = b"null" if body is None else body
    path = f"/api/v1/workers/{office.worker.id}/speculative-decoding"
    headers = {"Content-Type": "application/json"}
    reply = await office.ask("PATCH", path, sent, headers=headers)
    assert (reply.status, reply.code) == (422, "bad_value")
    assert (office.fleet.changed, await actions(office)) == ([], [])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None), ({"kv_prefix_cache": 1}, "kv_prefix_cache"),
        ({"kv_prefix_cache": None}, "kv_prefix_cache"),
        ({"run_requests_together": "yes"}, "run_requests_together"),
        ({"speculative_decoding": "off"}, "speculative_decoding"),
    ],
)  # fmt: skip
async def test_what_no_setting_can_be_is_422(office: Office, body: Any, param: str | None):
    """With the key at fault, where it is one."""
    reply = await office.ask("PATCH", f"/api/v1/workers/{office.worker.id}/settings", body)
    assert (reply.status, reply.json()["error"]["param"]) == (422, param)


@pytest.mark.parametrize("part", ["speculative-decoding", "settings"])
async def test_refusals_come_in_their_order(office: Office, part: str):
    """401, 403, 404, 422, 409, 503: each is said only where none before it applies."""
    store, fleet, id = office.store, office.fleet, office.organisation.id
    old, _ = await enrol(store, fleet, id, "old", OLD)
    fleet.here.pop(old.id)
    away, _ = await enrol(store, fleet, id, "away", NEW)
    fleet.here.pop(away.id)
    never, _ = await enrol(store, fleet, id, "never", None)
    member = await office.key("member")
    good: Any = {"mode": "off"} if part == "speculative-decoding" else {"kv_prefix_cache": True}
    bad = {"mode": 1}

    async def status(worker_id: str, body: Any, key: str | None) -> int:
        path = f"/api/v1/workers/{worker_id}/{part}"
        return (await office.ask("PATCH", path, body, key=key)).status

    nobody = "0" * 16
    assert await status(nobody, bad, None) == 401
    assert await status(nobody, bad, member) == 403
    assert await status(nobody, bad, "owner") == 404
    assert await status(old.id, bad, "owner") == 422
    assert await status(old.id, good, "owner") == 409
    assert await status(away.id, good, "owner") == 503
    assert await status(never.id, good, "owner") == 503
    assert await status(office.worker.id, good, "owner") == 202


async def test_where_drafting_is_not_offered_its_switch_is_not_there(office: Office):
    """404, for a worker that is there, before the body is looked at; other settings go on."""
    await office.store.offer_speculation(office.organisation.id, False)
    path = f"/api/v1/workers/{office.worker.id}"
    assert (await office.ask("PATCH", f"{path}/speculative-decoding", {"mode": 1})).status == 404
    assert (await office.ask("PATCH", f"{path}/settings", {"kv_prefix_cache": True})).status == 202


async def test_a_worker_that_needs_an_update_says_so(office: Office):
    """409, with what to do."""
    old, _ = await enrol(office.store, office.fleet, office.organisation.id, "old", OLD)
    path = f"/api/v1/workers/{old.id}/speculative-decoding"
    reply = await office.ask("PATCH", path, {"mode": "off"})
    assert (reply.status, reply.code) == (409, "worker_needs_update")
    assert "mlx-worker update" in reply.json()["error"]["message"]


# --- keys, audit ------------------------------------------------------------------------------


async def test_a_key_is_made_shown_once_and_revoked(office: Office):
    """It works at once, and no more at once."""
    body = {"name": "ci", "role": "member", "permissions": ["manage_workers"]}
    made = (await office.ask("POST", "/api/v1/keys", body)).json()
    secret = made.pop("secret")
    assert made["hint"] == secret[:8]
    listed = (await office.get("/api/v1/keys")).json()["data"]
    assert listed[1] == made
    assert (made["role"], made["permissions"]) == ("member", ["manage_workers"])
    assert (await office.ask("POST", "/api/v1/workers", {"name": "x"}, key=secret)).status == 201
    assert (await office.ask("DELETE", f"/api/v1/keys/{made['id']}")).status == 204
    assert (await office.get("/api/v1/me", key=secret)).status == 401
    found = await actions(office)
    assert (found[0], found[2]) == (
        ("key.revoke", "ci: member with manage_workers"),
        ("key.create", "ci: member with manage_workers"),
    )


@pytest.mark.parametrize(
    "body",
    [
        {"name": "x"}, {"role": "owner"}, {"name": "", "role": "owner"},
        {"name": "x", "role": "god"},
        {"name": "x" * 65, "role": "member"}, {"name": "a\nb", "role": "member"},
        {"name": "x", "role": "member", "permissions": ["all"]},
        {"name": "x", "role": "member", "permissions": "inference"},
        {"name": "x", "role": "member", "permissions": [["inference"]]},
        {"name": "x", "role": {}}, {"name": "x", "role": "member", "platform": True},
        b'{"name": "\\ud800", "role": "member"}',
    ],
    ids=str,
)  # fmt: skip
async def test_what_no_key_can_be_is_422(office: Office, body: Any):
    """And none is made."""
    assert (await office.ask("POST", "/api/v1/keys", body)).status == 422
    assert len(await office.store.keys(office.organisation.id)) == 1


async def test_the_audit_is_paged(office: Office):
    """The newest first, each entry once."""
    for n in range(5):
        await office.store.note(office.organisation.id, "a", "b", "c", str(n))
    first = (await office.get("/api/v1/audit?limit=3")).json()
    rest = (await office.get(f"/api/v1/audit?limit=3&cursor={first['next_cursor']}")).json()
    assert [one["details"] for one in first["data"] + rest["data"]] == list("43210")
    assert rest["next_cursor"] is None


# --- usage ------------------------------------------------------------------------------------


async def test_a_row_of_usage_has_every_figure(office: Office, clock: Clock):
    """null where none applies: no draft was used, no worker was found, it goes on."""
    id = await row(office, worker_id=office.worker.id, worker_name="mac")
    clock.now_s += 2
    await office.store.end_usage(
        id, prompt_tokens=7, completion_tokens=9, ttft_ms=12.5, tokens_per_second=40.0,
        draft_acceptance_rate=0.75, finish_reason="stop",
    )  # fmt: skip
    await row(office)
    begun, ended = (await office.get("/api/v1/usage")).json()["data"]
    assert ended == {
        "id": id, "request_id": "r", "at": clock.now_s - 2, "ended": clock.now_s,
        "key_id": office.owner.id, "key_name": "boss", "worker_id": office.worker.id,
        "worker_name": "mac", "model": "demo", "endpoint": "chat", "is_streamed": False,
        "prompt_tokens": 7, "completion_tokens": 9, "ttft_ms": 12.5, "tokens_per_second": 40.0,
        "draft_acceptance_rate": 0.75, "finish_reason": "stop", "error": None,
    }  # fmt: skip
    assert (begun["draft_acceptance_rate"], begun["worker_name"], begun["ended"]) == (None,) * 3


async def test_usage_is_filtered_by_its_query(office: Office, clock: Clock):
    """Each filter alone and together; a date is a moment in UTC."""
    clock.now_s = 1_767_225_600.0  # 2026-01-01
    first = await row(office, model="a b&c", worker_id=office.worker.id)
    await office.store.end_usage(first, error="overloaded")
    clock.now_s += 86_400
    second = await row(office)

    async def found(query: str) -> list[int]:
        reply = await office.get(f"/api/v1/usage?{query}")
        assert reply.status == 200, reply.body
        return [one["id"] for one in reply.json()["data"]]

    assert await found("") == [second, first]
    assert await found("model=a%20b%26c") == [first]
    assert await found(f"worker={office.worker.id}&error=any") == [first]
    assert await found("error=none") == [second]
    assert await found("since=2026-01-02") == [second]
    assert await found("until=2026-01-02T00:00:00Z") == [first]
    assert await found("since=2026-01-01T01:00:00.000%2B01:00&until=1767225601") == [first]
    assert await found(f"key={office.owner.id}") == [second, first]
    assert await found("key=0000000000000000") == []


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=1001", "limit=x", "limit=-1", "limit=1.5", "cursor=x", "cursor=-1",
        f"cursor={10**30}", "since=yesterday", "since=nan", "since=-1", "since=1e300", "until=inf",
        "since=2026-13-01", "format=xml", "model=%00", "model=" + "x" * 257, "nonsense=1",
        "limit=1&limit=2", "model=", "cursor=", "limit=%C2%B2", "since=0001-01-01T00:00:00%2B23:59",
    ],
)  # fmt: skip
async def test_what_no_filter_can_be_is_422(office: Office, query: str):
    """Never ignored: a filter that is misread would show the wrong rows as the right ones."""
    reply = await office.get(f"/api/v1/usage?{query}")
    assert (reply.status, reply.code) == (422, "bad_value")


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("name", ["worker", "key", "model", "error", "since", "cursor", "limit"])
async def test_sql_in_a_query_is_a_value(office: Office, name: str, text: str):
    """It finds nothing, or is refused; the rows are there afterwards."""
    await row(office)
    async with office.http.get(
        f"{office.url}/api/v1/usage",
        params={name: text},
        headers={"Authorization": f"Bearer {office.secret}"},
    ) as reply:
        found = await reply.json()
    assert reply.status == 422 or found["data"] == []
    assert len((await office.get("/api/v1/usage")).json()["data"]) == 1


@pytest.mark.parametrize("text", NASTY)
async def test_sql_in_a_body_or_a_path_is_a_text(office: Office, text: str):
    """Names are kept as they are written; ids of that form are nobody's."""
    added = await office.ask("POST", "/api/v1/workers", {"name": text})
    assert added.json()["name"] == text
    made = await office.ask("POST", "/api/v1/keys", {"name": text, "role": "owner"})
    assert made.json()["name"] == text
    path = f"/api/v1/workers/{text.replace(' ', '%20')}"
    assert (await office.get(path)).status == 404
    assert (await office.ask("DELETE", path)).status == 404
    assert (await office.sign_in(text)).status == 401
    assert (await office.get("/api/v1/me", key=text)).status == 401
    assert (await office.get("/api/v1/me", key=None, headers=office.session(text))).status == 401


async def table(office: Office, query: str = "") -> list[dict[str, str]]:
    reply = await office.get(f"/api/v1/usage?format=csv{query}")
    assert reply.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert 'filename="usage.csv"' in reply.headers["Content-Disposition"]
    return list(csv.DictReader(io.StringIO(reply.body.decode())))


async def test_the_table_runs_no_formula(office: Office):
    """A cell that a spreadsheet would run gets a quote; others stay as they are."""
    for name in ("=1+1", "+1", "-1", "@x", "\tx", "\rx", "plain", 'a,"b"'):
        await row(office, model=name)
    assert [one["model"] for one in await table(office)] == [
        'a,"b"', "plain", "'\rx", "'\tx", "'@x", "'-1", "'+1", "'=1+1",
    ]  # fmt: skip


async def test_the_table_has_all_rows_that_the_filters_leave(
    office: Office, monkeypatch: pytest.MonkeyPatch
):
    """Over many pages; with a limit, that page alone."""
    monkeypatch.setattr("mlx_worker.gateway.api_usage.MOST_ROWS", 3)
    ids = [await row(office, model=f"m{n % 2}") for n in range(10)]
    assert [int(one["id"]) for one in await table(office)] == ids[::-1]
    assert [int(one["id"]) for one in await table(office, "&model=m1")] == ids[9::-2]
    assert [int(one["id"]) for one in await table(office, "&limit=2")] == ids[:7:-1]


async def test_another_organisations_rows_are_never_seen(office: Office):
    """In no form, by no filter."""
    two = await office.store.add_organisation("other")
    await row(office, organisation_id=two.id)
    assert (await office.get("/api/v1/usage")).json()["data"] == []
    assert await table(office, f"&key={office.owner.id}") == []


# --- the platform -----------------------------------------------------------------------------


async def test_the_platform_switches_drafting(office: Office):
    """For all, for some; workers are told, and who did it is kept beside no organisation."""
    key = await office.key("owner", of=None)
    path = "/api/v1/platform/speculative-decoding"
    reply = await office.ask("PATCH", path, {"mode": "off"}, key=key)
    assert (reply.status, reply.json()) == (
        200, {"speculative_decoding": "off", "display_name": "Pendra", "revision": 1},
    )  # fmt: skip
    some = {"mode": "auto", "workers": [office.worker.id]}
    assert (await office.ask("PATCH", path, some, key=key)).json()["speculative_decoding"] == "auto"
    assert office.fleet.n_platform == 2
    assert (await actions(office, None))[1] == ("platform.speculative_decoding", "off, all workers")
    assert await actions(office) == []


@pytest.mark.parametrize(
    "body",
    [
        {}, {"mode": "on"}, {"mode": "off", "workers": []}, {"mode": "off", "workers": ["x"]},
        {"mode": "off", "workers": None}, {"mode": "off", "workers": [1]},
        {"mode": "off", "workers": "x"},
    ],
    ids=str,
)  # fmt: skip
async def test_what_no_switch_can_be_is_422(office: Office, body: Any):
    """An unknown worker too: its switch would seem to be turned."""
    key = await office.key("owner", of=None)
    path = "/api/v1/platform/speculative-decoding"
    assert (await office.ask("PATCH", path, body, key=key)).status == 422
    assert office.fleet.n_platform == 0


async def test_drafting_is_offered_to_one_organisation_after_the_other(office: Office):
    """And its keys see whether it is."""
    key = await office.key("owner", of=None)
    listed = (await office.get("/api/v1/platform/organisations", key=key)).json()["data"]
    assert [one["name"] for one in listed] == ["acme"]
    path = f"/api/v1/platform/organisations/{office.organisation.id}"
    reply = await office.ask("PATCH", path, {"is_speculation_available": False}, key=key)
    assert reply.json()["is_speculation_available"] is False
    mine = (await office.get("/api/v1/me")).json()["organisation"]
    assert (mine["is_speculation_available"], office.fleet.n_platform) == (False, 1)
    assert (
        await office.ask("PATCH", path.replace(mine["id"], "0" * 16), {}, key=key)
    ).status == 404


async def test_what_is_not_offered_to_an_organisation_is_told_in_words(office: Office):
    """404, which names the organisation and not the worker, that is there."""
    await office.store.offer_speculation(office.organisation.id, False)
    worker, _ = await office.store.add_worker(office.organisation.id, "mac")
    path = f"/api/v1/workers/{worker.id}/speculative-decoding"
    reply = await office.ask("PATCH", path, {"mode": "off"})
    message = "speculative decoding: not available to 'acme'. hint: ask whoever runs the gateway"
    assert (reply.status, reply.json()["error"]["message"]) == (404, message)


# --- when things go wrong ---------------------------------------------------------------------


async def test_a_database_that_is_gone_is_a_503(office: Office, tmp_path: Path):
    """In the common shape, for whoever tries again."""
    broken = await Store.open(tmp_path / "other.db")
    await broken.close()
    office.store._database = broken._database  # what a full disk or a lost one looks like
    reply = await office.get("/api/v1/me")
    assert (reply.status, reply.code) == (503, "store_failed")


async def test_a_path_that_is_none_is_404_and_a_method_405(office: Office):
    """In the common shape."""
    assert (await office.get("/api/v1/nothing")).code == "not_found"
    reply = await office.ask("PUT", "/api/v1/workers", {})
    assert (reply.status, reply.code) == (405, "method_not_allowed")
