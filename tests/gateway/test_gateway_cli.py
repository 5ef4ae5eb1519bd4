"""`mlx-worker gateway` as its users meet it: keys, workers, a process, its address, its end."""

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from mlx_worker import gateway_cli
from mlx_worker.errors import ConfigError, LastOwnerKey, NameTaken
from mlx_worker.gateway.serve import close_disabled
from mlx_worker.gateway.settings import GatewaySettings, link_url, load
from mlx_worker.gateway.store import Store
from mlx_worker.wire.link import Close
from tests.gateway.office import opened

ENDS_S = 20.0
KEY = re.compile(r"mwk_[\w-]{43}")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "gateway.db"


def ran(database: Path, *words: str, flags: tuple[str, ...] = ()) -> Result:
    """A command's output, in this process. Raises what the command line would tell of."""
    found = CliRunner().invoke(
        gateway_cli.app, ["--database", str(database), *flags, *words], catch_exceptions=False
    )
    assert found.exit_code == 0, found.output
    return found


def kept(database: Path, ask: Any) -> Any:
    async def opened() -> Any:
        store = await Store.open(database)
        try:
            return await ask(store)
        finally:
            await store.close()

    return asyncio.run(opened())


# --- keys and workers -------------------------------------------------------------------------


def test_the_first_key_is_an_owners(database: Path):
    """Of an organisation that is made for it, which is said; the next one is a member's."""
    first, second = (ran(database, "key", "create", name) for name in ("me", "you"))
    assert "made one called default" in first.stderr
    assert KEY.fullmatch(first.stdout.strip())
    assert "made one" not in second.stderr
    key = kept(database, lambda store: store.key_of(first.stdout.strip()))
    other = kept(database, lambda store: store.key_of(second.stdout.strip()))
    assert (key.role, key.name, other.role) == ("owner", "me", "member")
    assert other.organisation_id == key.organisation_id


def test_only_its_owner_reads_the_database(database: Path):
    """Whichever command makes it."""
    ran(database, "key", "create", "me")
    assert stat.S_IMODE(database.stat().st_mode) == 0o600


def test_a_workers_lines_go_into_its_config(database: Path):
    """Standard output is YAML, and nothing else; talk is on standard error."""
    found = ran(database, "worker", "add", "mac", flags=("--port", "9000"))
    section = yaml.safe_load(found.stdout)["gateway"]
    assert section["url"] == "ws://127.0.0.1:9000"
    worker = kept(database, lambda store: store.worker_of(section["key"]))
    assert (worker.name, "mac" in found.stderr) == ("mac", True)
    assert section["key"] not in found.stderr


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "ws://127.0.0.1:8400"),
        ({"host": "::1"}, "ws://[::1]:8400"),
        ({"tls_certificate": "c", "allowed_hosts": ("fleet.example",)}, "wss://fleet.example:8400"),
        ({"tls_certificate": "c", "allowed_hosts": ("f.example:1",)}, "wss://f.example:1"),
        ({"behind_proxy": True, "allowed_hosts": ("fleet.example",)}, "wss://fleet.example"),
        ({"tls_certificate": "c", "host": "0.0.0.0"}, "wss://HOST:8400"),
    ],
)
def test_the_url_is_how_the_gateway_is_reached(settings: dict[str, Any], url: str):
    """By its public name, where it has one."""
    assert link_url(GatewaySettings(**settings)) == url


def test_a_key_is_listed_without_itself_and_revoked(database: Path):
    """By the id that the list shows."""
    ran(database, "key", "create", "me")
    secret = ran(database, "key", "create", "ci", "--permission", "manage_workers").stdout.strip()
    platform = ran(database, "key", "create", "us", "--platform").stdout.strip()
    listed = ran(database, "key", "list").stdout
    assert secret[8:] not in listed
    assert platform.startswith("mwp_")
    assert [line.split()[2] for line in listed.splitlines()] == ["owner", "member", "platform"]
    [line] = [line for line in listed.splitlines() if line.endswith("ci")]
    ran(database, "key", "revoke", line.split()[0])
    assert kept(database, lambda store: store.key_of(secret)) is None
    entries, _ = kept(database, lambda store: store.audit(None))
    assert [(one.actor, one.action) for one in entries] == [("command line", "key.create")]


def test_a_worker_is_listed_and_disabled(database: Path):
    """Its key is known no more."""
    key = yaml.safe_load(ran(database, "worker", "add", "mac").stdout)["gateway"]["key"]
    [line] = ran(database, "worker", "list").stdout.splitlines()
    assert line.split() == [key[4:20], "default", "never", "here", "mac"]
    ran(database, "worker", "disable", line.split()[0])
    assert ran(database, "worker", "list").stdout == ""
    assert kept(database, lambda store: store.worker_of(key)).disabled_s


def test_of_several_organisations_one_must_be_named(database: Path):
    """By name or id; the refusal lists them."""
    id = ran(database, "organisation", "add", "acme").stdout.strip()
    ran(database, "organisation", "add", "other")
    assert ran(database, "organisation", "list").stdout.splitlines()[0] == f"{id}  acme"
    with pytest.raises(ConfigError, match="acme, other"):
        ran(database, "key", "create", "me")
    with pytest.raises(ConfigError, match="'nobody'"):
        ran(database, "worker", "add", "mac", "--organisation", "nobody")
    ran(database, "key", "create", "me", "--organisation", "other")
    ran(database, "worker", "add", "mac", "--organisation", id)
    assert len(kept(database, lambda store: store.workers(id))) == 1


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (["key", "create", ""], ConfigError, "NAME"),
        (["key", "create", "a\nb"], ConfigError, "NAME"),
        (["key", "create", "x" * 65], ConfigError, "64"),
        (["key", "create", "x", "--permission", "all"], ConfigError, "manage_workers"),
        (["key", "create", "x", "--platform", "--role", "owner"], ConfigError, "--platform"),
        (["key", "revoke", "0" * 16], ConfigError, "key list"),
        (["worker", "disable", "'; DROP TABLE workers; --"], ConfigError, "worker list"),
        (["organisation", "add", "default"], NameTaken, "default"),
    ],
)
def test_what_can_t_be_done_says_what_can(
    database: Path, words: list[str], error: type[Exception], text: str
):
    """Nothing is changed."""
    ran(database, "key", "create", "me")
    with pytest.raises(error, match=re.escape(text)):
        ran(database, *words)
    assert len(ran(database, "key", "list").stdout.splitlines()) == 1


def test_the_last_owners_key_is_not_revoked(database: Path):
    """Not by mistake, and not from here."""
    ran(database, "key", "create", "me")
    with pytest.raises(LastOwnerKey):
        ran(database, "key", "revoke", ran(database, "key", "list").stdout.split()[0])


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "line 1: unknown key: prot. hint: did you mean port?"),
        ("port: 70000", "line 1: port: 70000"),
        ("host: 0.0.0.0", "--behind-proxy"),
        ("host: 192.0.2.1", "plain text"),
        ("host: 'x:80'", "without a port"),
        ("tls_key: k.pem", "only one of them"),
        ("allowed_hosts: ['http://x']", "names or addresses"),
        ("display_name: ''", "display_name"),
        ("- a", "must be sections"),
    ],
)
def test_a_setting_that_can_t_be_is_named_with_its_line(tmp_path: Path, text: str, message: str):
    """And with what to do."""
    file = tmp_path / "g.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(file)


def test_flags_come_before_the_file_and_the_file_before_defaults(home: Path):
    """The file of the folder is read where none is named."""
    assert load() == GatewaySettings(database=home / ".mlx-worker" / "gateway.db")
    (home / ".mlx-worker").mkdir()
    (home / ".mlx-worker" / "gateway.yaml").write_text("port: 1\nhost: '::1'\n")
    settings = load(None, {"port": 2, "host": None})
    assert (settings.port, settings.host) == (2, "::1")
    assert load(None, {"host": "0.0.0.0", "behind_proxy": True}).behind_proxy


# --- the process ------------------------------------------------------------------------------


class Running:
    """A gateway's process; environ has a folder of its own."""

    def __init__(self, home: Path, *flags: str) -> None:
        environ = {**os.environ, "MLX_WORKER_HOME": str(home)}
        command = [sys.executable, "-m", "mlx_worker", "gateway", "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"console: (https?://[^/]+)/\n", line)
        assert found, self.process.communicate()[1]
        self.url = found[1]

    def status(self, path: str, key: str) -> int:
        asked = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(asked, timeout=ENDS_S) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=ENDS_S)
        return self.process.returncode


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    one = Running(tmp_path / "home")
    yield one
    if one.process.poll() is None:
        one.process.kill()
    one.process.communicate()


def test_keys_and_revocations_count_at_once_in_a_running_gateway(running: Running, tmp_path: Path):
    """Both work on its file; it stops with 0, and its logs hold lines and no key."""
    database = tmp_path / "home" / "gateway.db"
    first = ran(database, "key", "create", "me").stdout.strip()
    second = ran(database, "key", "create", "two", "--role", "owner").stdout.strip()
    assert running.status("/api/v1/me", first) == 200
    ran(database, "key", "revoke", ran(database, "key", "list").stdout.split()[0])
    assert running.status("/api/v1/me", first) == 401
    assert running.status(f"/api/v1/usage?key={second}", second) == 200
    assert running.end() == 0
    logs = tmp_path / "home" / "logs"
    lines = [json.loads(line) for line in (logs / "gateway-access.log").read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 401, 200]
    written = "".join(path.read_text() for path in logs.iterdir())
    assert not KEY.search(written)
    assert not (logs / "worker.log").exists()


def refused(home: Path, *flags: str) -> str:
    """What a gateway says that doesn't start; it exits with 2."""
    ended = subprocess.run(
        [sys.executable, "-m", "mlx_worker", "gateway", *flags],
        env={**os.environ, "MLX_WORKER_HOME": str(home)},
        capture_output=True, text=True, timeout=ENDS_S,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    return ended.stderr


def test_a_second_gateway_on_the_same_database_is_refused(running: Running, tmp_path: Path):
    """It would end the requests of the first; on another port too."""
    said = refused(tmp_path / "home", "--port", "0")
    assert "another gateway uses it" in said
    assert running.end(signal.SIGINT) == 0


def test_an_address_in_use_says_what_to_do(tmp_path: Path):
    """With the address, whose it is, and the flag for another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(tmp_path, "--port", str(port))
    assert re.search(rf"127.0.0.1:{port} is taken by \S+, pid {os.getpid()}\.", said)
    assert "choose another --port" in said


def test_a_certificate_that_is_none_says_so(tmp_path: Path):
    """Before anything is bound."""
    (tmp_path / "c.pem").write_text("none")
    flags = ("--tls-certificate", str(tmp_path / "c.pem"), "--tls-key", str(tmp_path / "c.pem"))
    assert "PEM" in refused(tmp_path, *flags)


async def test_a_worker_that_was_disabled_elsewhere_is_hung_up_on(tmp_path: Path):
    """As by the command line, which can't reach the connection itself."""
    async with opened(tmp_path) as office:
        await office.store.disable_worker(office.organisation.id, office.worker.id)
        looking = asyncio.create_task(close_disabled(office.store, office.fleet, 0.01))
        async with asyncio.timeout(ENDS_S):
            await office.fleet.has_closed.wait()
        looking.cancel()
        assert office.fleet.closed == [(office.worker.id, Close.DISABLED)]


def test_a_killed_gateways_requests_are_ended_by_the_next_one(tmp_path: Path):
    """With gateway_restarted; the row is there, with when."""
    database = tmp_path / "home" / "gateway.db"
    first = Running(tmp_path / "home")
    ran(database, "key", "create", "me")
    [one] = kept(database, lambda store: store.organisations())

    async def begin(store: Store) -> None:
        await store.begin_usage(
            request_id="r", organisation_id=one.id, key_id="k", key_name="n", model="m",
            endpoint="chat", is_streamed=True,
        )  # fmt: skip

    kept(database, begin)
    first.end(signal.SIGKILL)
    second = Running(tmp_path / "home")
    assert second.end() == 0
    [row], _ = kept(database, lambda store: store.usage(one.id))
    assert row.error == "gateway_restarted"


def test_a_workers_lines_name_the_gateway_that_runs(running: Running, tmp_path: Path):
    """Whatever flags it was started with; a flag of the command itself counts more."""
    database = tmp_path / "home" / "gateway.db"
    said = yaml.safe_load(ran(database, "worker", "add", "mac").stdout)["gateway"]["url"]
    assert said == running.url.replace("http", "ws")
    other = ran(database, "worker", "add", "mac 2", flags=("--port", "9000")).stdout
    assert yaml.safe_load(other)["gateway"]["url"] == "ws://127.0.0.1:9000"
