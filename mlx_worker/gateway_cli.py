"""The command `mlx-worker gateway`: runs it, and manages its organisations, keys and workers.

Owns its flags, what is printed, and which organisation is meant. Leaves the work to gateway/, which
is imported only by what needs it. Everything is done in the database itself, whether a gateway runs
or not. Main thread.

Standard output has what a program or a file takes: a key, lines of a configuration, a list.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from mlx_worker.errors import ConfigError, shown
from mlx_worker.terminal import talk

if TYPE_CHECKING:
    from mlx_worker.gateway.records import Organisation, Permission
    from mlx_worker.gateway.settings import GatewaySettings
    from mlx_worker.gateway.store import Store

ACTOR = "command line"
FIRST = "default"  # the organisation that is made where there is none
MOST_NAME_CHARS = 64
T = TypeVar("T")
RoleName = Literal["owner", "operator", "member"]

app = typer.Typer(
    help="Run a gateway; manage its keys and workers.",
    rich_markup_mode=None,
)
organisations = typer.Typer(help="Who owns keys and workers.", rich_markup_mode=None)
keys = typer.Typer(help="Keys for clients and for the console.", rich_markup_mode=None)
workers = typer.Typer(help="Workers that may dial in.", rich_markup_mode=None)
app.add_typer(organisations, name="organisation")
app.add_typer(keys, name="key")
app.add_typer(workers, name="worker")

NameArgument = Annotated[str, typer.Argument(help="As lists show it.", metavar="NAME")]
IdArgument = Annotated[str, typer.Argument(help="As the list shows it.", metavar="ID")]
OrganisationFlag = Annotated[
    str | None, typer.Option(help="Its name or id.", show_default="the only one")
]


@dataclass(frozen=True)
class Given:
    """What was said before the command: it holds for all of them."""

    config: Path | None
    flags: dict[str, object]

    @property
    def settings(self) -> "GatewaySettings":
        from mlx_worker.gateway.settings import load

        return load(self.config, self.flags)

    @property
    def says_where(self) -> bool:
        """A flag says where the gateway listens, which counts more than where it does."""
        return any(value is not None for key, value in self.flags.items() if key != "database")


@app.callback(invoke_without_command=True)
def gateway(
    context: typer.Context,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", help="Its settings, in YAML.", show_default="gateway.yaml"),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="0 takes a free one.", show_default="8400")
    ] = None,
    database: Annotated[
        Path | None, typer.Option(help="Its SQLite file.", show_default="gateway.db")
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="In PEM; serves https.", show_default=False)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Of the certificate.", show_default=False)
    ] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="A proxy in front of it ends TLS.")
    ] = False,
) -> None:
    """Run a gateway; manage its keys and workers.

    Without a command: serve until told to stop (Ctrl-C). Other than on a loopback address it needs
    TLS, its own or a proxy's. What it does is logged in the folder's logs/.
    """
    flags: dict[str, object] = {
        "host": host,
        "port": port,
        "database": database,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "behind_proxy": behind_proxy or None,
    }
    context.obj = Given(config_file, flags)
    if context.invoked_subcommand is None:
        raise typer.Exit(serve(context.obj.settings))


def serve(settings: "GatewaySettings") -> int:
    from mlx_worker import logs
    from mlx_worker.gateway import serve as serving

    folder = logs.default_folder()
    try:
        written = logs.written_to(folder, names=logs.OF_GATEWAY)
        written.__enter__()
    except OSError as error:
        hint = "choose another folder with MLX_WORKER_HOME"
        raise ConfigError(f"{folder}: can't be written: {error.strerror}", hint=hint) from None
    try:
        return serving.run(settings, announce, talk)
    finally:
        written.__exit__(None, None, None)


def announce(address: str) -> None:
    """Where the console is, once requests can be served."""
    print(f"console: {address}", flush=True)


# --- organisations ----------------------------------------------------------------------------


@organisations.command("add")
def add_organisation(context: typer.Context, name: NameArgument) -> None:
    """Add one; its first owner's key is made by `gateway key create`."""

    async def work(store: "Store") -> str:
        made = await store.add_organisation(checked_name(name))
        await store.note(made.id, ACTOR, "organisation.add", made.id, made.name)
        return made.id

    print(in_store(context, work))


@organisations.command("list")
def list_organisations(context: typer.Context) -> None:
    """Show them all: id and name."""
    for one in in_store(context, lambda store: store.organisations()):
        print(f"{one.id}  {one.name}")


# --- keys -------------------------------------------------------------------------------------


@keys.command("create")
def create_key(
    context: typer.Context,
    name: NameArgument,
    organisation: OrganisationFlag = None,
    role: Annotated[
        RoleName | None,
        typer.Option(help="What it may do.", show_default="member; the first: owner"),
    ] = None,
    permission: Annotated[
        list[str] | None,
        typer.Option(help="One more than its role has; may be repeated.", metavar="WORD"),
    ] = None,
    platform: Annotated[
        bool, typer.Option("--platform", help="A key of the platform, of no organisation.")
    ] = False,
) -> None:
    """Make a key and print it, this once."""
    if platform and (organisation or role or permission):
        raise ConfigError(
            "--platform: excludes --organisation, --role and --permission",
            hint="a platform key does what the platform does, and nothing else",
        )

    more = permissions(permission or [])

    async def work(store: "Store") -> str:
        if platform:
            key, secret = await store.add_key(None, checked_name(name))
            await store.note(None, ACTOR, "key.create", key.id, f"{key.name}: platform")
            return secret
        owner = await chosen(store, organisation)
        wanted = role or ("member" if await store.keys(owner.id) else "owner")
        key, secret = await store.add_key(owner.id, checked_name(name), wanted, more)
        await store.note(owner.id, ACTOR, "key.create", key.id, f"{key.name}: {key.role}")
        talk(f"{key.role}'s key of {owner.name}; it is shown this once")
        return secret

    print(in_store(context, work))


def permissions(words: list[str]) -> "list[Permission]":
    """Raises ConfigError for a word that is none."""
    from mlx_worker.gateway.records import PERMISSIONS

    for word in words:
        if word not in PERMISSIONS:
            limit = f"must be one of {', '.join(PERMISSIONS)}"
            raise ConfigError(f"--permission: {shown(word)}, {limit}")
    return [one for one in PERMISSIONS if one in words]


@keys.command("list")
def list_keys(context: typer.Context) -> None:
    """Show those that aren't revoked: id, first characters, role, organisation, name."""

    async def work(store: "Store") -> list[str]:
        found = [(one.name, one.id) for one in await store.organisations()]
        owners: list[tuple[str, str | None]] = [*found, ("platform", None)]
        return [
            f"{key.id}  {key.hint}…  {'platform' if key.is_platform else key.role:8}  "
            f"{name}  {key.name}"
            for name, id in owners
            for key in await store.keys(id)
        ]

    for line in in_store(context, work):
        print(line)


@keys.command("revoke")
def revoke_key(context: typer.Context, id: IdArgument) -> None:
    """Refuse a key from now on; a gateway that runs does so with its next request."""

    async def work(store: "Store") -> str:
        owners = [*(one.id for one in await store.organisations()), None]
        for owner in owners:
            if any(key.id == id for key in await store.keys(owner)):
                key = await store.revoke_key(owner, id)
                await store.note(owner, ACTOR, "key.revoke", id, key.name)
                return key.name
        raise ConfigError(f"{shown(id)}: no key has this id", hint="mlx-worker gateway key list")

    talk(f"{in_store(context, work)} is revoked")


# --- workers ----------------------------------------------------------------------------------


@workers.command("add")
def add_worker(
    context: typer.Context, name: NameArgument, organisation: OrganisationFlag = None
) -> None:
    """Let a worker dial in; prints the lines for its config.yaml, with its key, this once."""
    from mlx_worker.gateway.settings import SOME_HOST, link_url

    given: Given = context.obj

    async def work(store: "Store") -> tuple[str, str]:
        owner = await chosen(store, organisation)
        worker, secret = await store.add_worker(owner.id, checked_name(name))
        await store.note(owner.id, ACTOR, "worker.add", worker.id, worker.name)
        talk(f"{worker.name} ({worker.id}) of {owner.name}; put this into its config.yaml:")
        running = None if given.says_where else await store.link_url()
        return running or link_url(given.settings), secret

    url, secret = in_store(context, work)
    if SOME_HOST in url:
        talk(f"with the gateway's public name in place of {SOME_HOST}")
    print(f"gateway:\n  url: {url}\n  key: {secret}")


@workers.command("list")
def list_workers(context: typer.Context) -> None:
    """Show those that aren't disabled: id, organisation, version, name."""

    async def work(store: "Store") -> list[str]:
        names = {one.id: one.name for one in await store.organisations()}
        return [
            f"{one.id}  {names[one.organisation_id]}  {one.report.version or 'never here'}  "
            f"{one.name}"
            for one in await store.workers(None)
        ]

    for line in in_store(context, work):
        print(line)


@workers.command("disable")
def disable_worker(context: typer.Context, id: IdArgument) -> None:
    """Refuse a worker from now on; a gateway that runs closes its connection within seconds."""

    async def work(store: "Store") -> str:
        worker = await store.worker(None, id)
        if worker is None:
            hint = "mlx-worker gateway worker list"
            raise ConfigError(f"{shown(id)}: no worker has this id", hint=hint)
        await store.disable_worker(worker.organisation_id, id)
        await store.note(worker.organisation_id, ACTOR, "worker.disable", id, worker.name)
        return worker.name

    talk(f"{in_store(context, work)} is disabled")


# --- shared by these --------------------------------------------------------------------------


def in_store(context: typer.Context, work: Callable[["Store"], Awaitable[T]]) -> T:
    """Do this with the open database. Raises ConfigError where it can't be used."""
    from mlx_worker.gateway.store import Store

    path: Path = context.obj.settings.database

    async def opened() -> T:
        store = await Store.open(path)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(opened())


async def chosen(store: "Store", wanted: str | None) -> "Organisation":
    """The organisation that is meant; the only one, else the first is made. Raises ConfigError."""
    found = await store.organisations()
    if wanted is not None:
        for one in found:
            if wanted in (one.id, one.name):
                return one
    elif len(found) == 1:
        return found[0]
    elif not found:
        talk(f"there is no organisation yet; made one called {FIRST}")
        made = await store.add_organisation(FIRST)
        await store.note(made.id, ACTOR, "organisation.add", made.id, made.name)
        return made
    names = ", ".join(one.name for one in found) or "none"
    what = "which one?" if wanted is None else f"{shown(wanted)}, there is none"
    raise ConfigError(f"--organisation: {what}", hint=f"one of: {names}")


def checked_name(name: str) -> str:
    text = name.strip()
    if not text.isprintable() or not 1 <= len(text) <= MOST_NAME_CHARS:
        limit = f"must be 1 to {MOST_NAME_CHARS} visible characters"
        raise ConfigError(f"NAME: {shown(name)}, {limit}")
    return text
