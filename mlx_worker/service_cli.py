"""The command `mlx-worker service`: the worker as a background service of its user.

Owns its flags and how what came of it is told. Leaves the doing to service/. Main thread.

Exit codes: 2 for what the caller must change, 1 for a service that doesn't run though it should,
or a supervisor that didn't do as it was told.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mlx_worker.errors import ConfigError, ServiceError
from mlx_worker.terminal import talk

if TYPE_CHECKING:
    from mlx_worker.local import Seen
    from mlx_worker.service.manager import Manager, ServiceState

TELLS_S = 10.0  # a start is watched, to say what comes of it
POLL_S = 0.2
SURE_S = 1.0  # that it doesn't run, before that is said
LINES = 40
LOGS = "mlx-worker service logs"
AGAIN = "once that is mended, mlx-worker service start"
PartName = Literal["worker", "menubar"]
System = Literal["macos", "linux"]

app = typer.Typer(
    help="Run the worker in the background, from login on.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PartFlag = Annotated[PartName | None, typer.Option(help="That one alone.", show_default="all")]


# --- install and uninstall --------------------------------------------------------------------


@app.command(short_help="Start the worker now, at each login, and after a crash.")
def install(
    part: PartFlag = None,
    is_preview: Annotated[
        bool, typer.Option("--print", help="Write one unit to standard output, and nothing else.")
    ] = False,
    system: Annotated[
        System | None, typer.Option("--for", help="Whose unit, with --print.", show_default="macos")
    ] = None,
) -> None:
    """Start the worker now and at each login, and again after a crash.

    On a Mac: a LaunchAgent each for the worker and for the menu in the menu bar; on Linux a systemd
    unit of this user.
    """
    if is_preview:
        sys.stdout.write(preview(part or "worker", system or "macos"))
        return
    if system:
        raise ConfigError("--for: needs --print", hint="what is installed is of this machine")
    supervisor, began_s = managed(), time.time()
    parts = chosen(supervisor, part)
    say_left_out()
    for each in parts:
        state = supervisor.install(each)
        talk(f"wrote {state.unit}")
        if state.problem:
            talk("it is not started: it will be at the next login, where there is a systemd then")
            raise ServiceError(state.problem)
        talk(f"the {each} starts now and at each login")
    told_start(supervisor, parts, began_s)
    talk("undo: mlx-worker service uninstall")


def preview(part: PartName, system: System) -> str:
    from mlx_worker.service import launchd, systemd
    from mlx_worker.service.job import job

    if system == "macos":
        return launchd.plist(job(part, "darwin")).decode("utf-8")
    systemd.check_part(part)
    return systemd.unit_text(job(part, "linux"))


def say_left_out() -> None:
    from mlx_worker.service.job import left_out

    if names := left_out():
        talk(
            f"{', '.join(names)}: set in this terminal, not for the service; "
            "mlx-worker config set writes such settings into config.yaml"
        )


@app.command()
def uninstall(part: PartFlag = None) -> None:
    """End it and remove it; models, settings and logs stay."""
    from mlx_worker.config import home

    supervisor = managed()
    for each in chosen(supervisor, part):
        was_there = supervisor.uninstall(each)
        talk(f"the {each} is removed" if was_there else f"the {each} wasn't installed")
    if home().exists():
        talk(f"{home()}, with its settings, is kept")


# --- start and stop ---------------------------------------------------------------------------


@app.command()
def start(part: PartFlag = None) -> None:
    """Start it, now and at each login."""
    supervisor, began_s = managed(), time.time()
    parts = present(supervisor, part)
    for each in parts:
        was_running = supervisor.state(each).is_running
        supervisor.start(each)
        talk(f"the {each} {'runs already' if was_running else 'starts'}")
    told_start(supervisor, parts, began_s)


@app.command(short_help="End it, until the next login, once its requests are done.")
def stop(
    part: PartFlag = None,
    disable: Annotated[
        bool, typer.Option("--disable", help="Not at logins either, until service start.")
    ] = False,
) -> None:
    """End it once its requests are finished, which have 25 s; the next login starts it again."""
    supervisor = managed()
    for each in present(supervisor, part):
        if supervisor.state(each).is_running:
            talk(f"the {each} is told to end")
        state = supervisor.stop(each, is_lasting=disable)
        again = "the next login starts it again" if state.is_enabled else "it stays so"
        talk(f"the {each} is stopped; {again}: mlx-worker service start")


@app.command()
def restart(part: PartFlag = None) -> None:
    """End it once its requests are finished, and start it."""
    supervisor, began_s = managed(), time.time()
    parts = present(supervisor, part)
    for each in parts:
        if supervisor.state(each).is_running:
            talk(f"the {each} is told to end")
        supervisor.restart(each)
        talk(f"the {each} starts again")
    told_start(supervisor, parts, began_s)


def managed() -> "Manager":
    from mlx_worker.service import manager

    return manager.manager()


def chosen(supervisor: "Manager", part: PartName | None) -> tuple[PartName, ...]:
    return (part,) if part else supervisor.parts


def present(supervisor: "Manager", part: PartName | None) -> tuple[PartName, ...]:
    """Of several parts those that are installed; of none, the worker, whose verb says so."""
    if part:
        return (part,)
    return tuple(each for each in supervisor.parts if supervisor.state(each).is_installed) or (
        "worker",
    )


def told_start(supervisor: "Manager", parts: tuple[PartName, ...], began_s: float) -> None:
    """Wait for what comes of a start, and say it. Raises ServiceError where it doesn't run."""
    from mlx_worker.local import look

    if "worker" not in parts:
        return
    until_s, since_s = time.monotonic() + TELLS_S, None
    while time.monotonic() < until_s:
        state = supervisor.state("worker")  # before the look: one that ended has said its last
        try:
            line = verdict(look(), state, began_s)
        except ServiceError:
            since_s = since_s or time.monotonic()
            if time.monotonic() - since_s >= SURE_S:
                raise
        else:
            since_s = None
            if line:
                talk(line)
                return
        time.sleep(POLL_S)
    talk("it loads its model; mlx-worker status says when it is ready")


def verdict(seen: "Seen", state: "ServiceState", began_s: float) -> str | None:
    """What came of a start at `began_s`; None: nobody knows yet.

    Raises ServiceError where it doesn't run, if that stays so: for a moment, a supervisor may
    still tell of the time before.
    """
    if seen.condition == "ready" and seen.pid == state.pid:
        return f"it is ready, its console: {seen.address}"
    is_new = seen.at_s is not None and seen.at_s >= began_s
    if is_new and seen.condition == "stopped" and not state.is_running:
        raise ServiceError("the worker was told to stop meanwhile", hint="mlx-worker service start")
    if state.is_running or state.last_exit is None:
        return None
    said = seen.error if is_new else last_words(began_s)
    why = f": {said}" if said else ""
    if state.last_exit != 0:
        raise ServiceError(
            f"the worker {ended_with(state.last_exit)} and is started again every few seconds{why}",
            hint=f"{LOGS} shows more; mlx-worker service stop ends that",
        )
    if seen.condition == "ready":
        raise ServiceError(
            f"another worker runs in this folder, pid {seen.pid}: {seen.address}",
            hint=f"end it where it was started; {AGAIN}",
        )
    line = f"the worker can't start{why or f': {LOGS} shows why'}"
    if "hint: " in why:  # the worker's own comes first
        raise ServiceError(f"{line}; {AGAIN}")
    raise ServiceError(line, hint=AGAIN)


def last_words(began_s: float) -> str | None:
    """What was printed last since then, by one that couldn't say it otherwise: of a full disk."""
    from mlx_worker.logs import default_folder
    from mlx_worker.service.job import CAPTURES
    from mlx_worker.service.log_view import last_lines

    capture = default_folder() / CAPTURES["worker"]
    try:
        if capture.stat().st_mtime < began_s - 1:
            return None
        lines = [line for line in last_lines(capture, 5) if line.strip()]
    except OSError:
        return None
    return lines[-1].removeprefix("mlx-worker: ") if lines else None


def ended_with(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


# --- status -----------------------------------------------------------------------------------


@app.command(short_help="Show whether it is installed, and whether it runs.")
def status(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show whether it is installed, whether it runs, and whether a login starts it."""
    from mlx_worker import logs

    supervisor = managed()
    states = [supervisor.state(part) for part in supervisor.parts]
    if as_json:
        parts = [{**asdict(state), "is_running": state.is_running} for state in states]
        line = {"supervisor": supervisor.name, "parts": parts, "logs": logs.default_folder()}
        print(json.dumps(line, default=str, ensure_ascii=False))
        return
    for state in states:
        print(f"{state.part:8} {condition(state)}")
        if state.is_installed:
            print(f"{'':8} {state.unit}")
    print(f"{'logs':8} {logs.default_folder()}")
    for line in (*remarks(states), *elsewhere(states[0])):
        talk(line)


def condition(state: "ServiceState") -> str:
    """In one line, what it does now and after the next login."""
    if not state.is_installed and state.is_running:
        return f"running, pid {state.pid}, but its unit is gone: mlx-worker service install"
    if not state.is_installed:
        return "not installed: mlx-worker service install"
    login = "starts at login" if state.is_enabled else "doesn't start at login"
    if state.is_running:
        return f"running, pid {state.pid}; {login}"
    if not state.is_loaded and not state.problem:
        return f"stopped; {login}; now: mlx-worker service start"
    if state.last_exit:
        return f"{ended_with(state.last_exit)}, is started again; {login}; why: {LOGS}"
    if state.last_exit == 0:
        return f"ended by itself; {login}; why: {LOGS}"
    if state.problem:
        return "installed; whether it runs can't be told"
    return f"not running; {login}"


def remarks(states: "list[ServiceState]") -> list[str]:
    """What else is to be known: nobody to ask, another folder than this terminal's."""
    from mlx_worker.config import home

    found = [state.problem for state in states if state.problem][:1]
    folders = {state.folder for state in states if state.is_installed}
    for folder in folders - {home().absolute()}:
        found.append(f"the service's folder is {folder}, this terminal's is {home()}")
    return found


def elsewhere(service: "ServiceState") -> list[str]:
    """A worker of this folder that isn't the service's, so that nobody takes it for none."""
    from mlx_worker.local import look

    seen = look()
    if not seen.is_running or seen.pid is None or seen.pid == service.pid or service.is_running:
        return []
    where = f", {seen.address}" if seen.address else ""
    return [f"a worker runs in this folder that isn't the service's: pid {seen.pid}{where}"]


# --- logs -------------------------------------------------------------------------------------


@app.command()
def logs(
    is_following: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option(help="How many of the last.", min=0)] = LINES,
    access: Annotated[
        bool, typer.Option("--access", help="The requests, a line each, instead.")
    ] = False,
) -> None:
    """Show what the worker did last, in this machine's time."""
    from mlx_worker.logs import OF_WORKER, default_folder
    from mlx_worker.service.job import CAPTURES
    from mlx_worker.service.log_view import follow, is_newer, last_lines, readable

    log = default_folder() / OF_WORKER[access]
    capture = log.with_name(CAPTURES["worker"])
    try:
        shown = last_lines(log, lines)
        is_missing = not log.exists()
        printed = last_lines(capture, lines) if not access and is_newer(capture, log) else []
    except OSError as error:
        raise ConfigError(f"{error.filename}: can't be read: {error.strerror}") from None
    if is_missing and not printed and not is_following:
        raise ServiceError(f"no log yet: {log}", hint="it is there once a worker ran")
    try:
        for line in shown:
            print(readable(line))
        if printed:
            talk(f"what it printed since, from {capture}:")
            print("\n".join(printed), flush=True)
        if not is_following:
            return
        if is_missing:
            talk(f"waiting for {log}")
        for line in follow(log):
            print(readable(line), flush=True)
    except BrokenPipeError:  # whoever read it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
