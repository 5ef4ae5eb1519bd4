"""The command `mlx-worker status`: the worker on one screen, whether it runs or not.

Owns its flags and layout. Leaves what is true to local.py and service/, the verdicts to history.py.
Main thread; some 2 s where a worker hangs, else at once.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_worker.errors import ConfigError, shown
from mlx_worker.terminal import talk

if TYPE_CHECKING:
    from mlx_worker.decisions import History
    from mlx_worker.local import Seen
    from mlx_worker.service.manager import ServiceState

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
NO_WORD = "it ended without a word: killed, its disk full, or the machine went down"
POWER = {True: "battery", False: "mains"}
FIRST_WORDS = {"never": "never started"}  # where the condition alone is no word for people


def add_to(app: typer.Typer) -> None:
    app.command(short_help="Show what the worker does, and whether drafting pays.")(status)


def status(
    model: Annotated[
        str | None, typer.Option(help="Of this one alone.", show_default="all")
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Every request that is kept, one by one.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object; with --history one a line.")
    ] = False,
) -> None:
    """Show what the worker does, whether drafting pays for each model, and why.

    No worker needs to run: then it shows what was last known of it, and what replies measured as
    they were written on this machine.
    """
    from mlx_worker import history as show
    from mlx_worker.tables import console

    chosen = measured(model)
    if history and as_json:
        for line in (line for each in chosen for line in show.request_json(each)):
            print(json.dumps(line, ensure_ascii=False))
    elif history:
        show.print_all(console(), chosen, has_requests=True)
    elif as_json:
        print(json.dumps(as_object(chosen), ensure_ascii=False, default=str))
    else:
        print_screen(chosen, is_all=model is None)


def measured(model: str | None) -> "list[History]":
    """What the decision log has; what of it can't be read is said. Raises ConfigError."""
    from mlx_worker import decisions

    try:
        kept = decisions.read(decisions.default_folder(), has_rounds=False)
    except OSError as error:
        talk(f"mlx-worker: the decision log can't be read: {error.filename}: {error.strerror}")
        kept = []
    chosen = [each for each in kept if model in (None, each.model, Path(each.model).name)]
    if model is not None and not chosen:
        known = ", ".join(each.model for each in kept) or "none"
        raise ConfigError(f"--model: nothing measured for {shown(model)}", hint=f"known: {known}")
    if n_skipped := sum(each.n_skipped for each in chosen):
        what = "1 line" if n_skipped == 1 else f"{n_skipped} lines"
        talk(f"mlx-worker: {what} of the decision log could not be read")
    return chosen


# --- for a program ----------------------------------------------------------------------------


def as_object(chosen: "Sequence[History]") -> dict[str, Any]:
    """`{"worker": what is seen of it, "service": its supervisor's word, "models": […]}`."""
    from mlx_worker import history as show
    from mlx_worker.local import look

    seen, (supervisor, service) = look(), served()
    models = [{"id": id, "speculation": text} for id, text in seen.models]
    return {
        "worker": {**asdict(seen), "is_running": seen.is_running, "models": models},
        "service": {
            "supervisor": supervisor,
            **asdict(service),
            "is_running": service.is_running,
        },
        **show.as_json(chosen),
    }


def served() -> "tuple[str, ServiceState]":
    """The name of this machine's supervisor, and what it says of the worker."""
    from mlx_worker.service.manager import manager

    supervisor = manager()
    return supervisor.name, supervisor.state("worker")


# --- for people -------------------------------------------------------------------------------


def print_screen(chosen: "Sequence[History]", *, is_all: bool) -> None:
    """The worker, then each model's last verdict; of one that is named, this alone."""
    from mlx_worker import history as show
    from mlx_worker.local import look
    from mlx_worker.tables import console

    out = console()
    if is_all:
        seen, (_, service) = look(), served()
        print_worker(out, seen, service)
        print_unmeasured(out, seen, chosen)
        if not any(each.parts for each in chosen) and seen.condition != "never":
            return
        out.print()
    show.print_all(out, chosen)


def print_worker(out: Any, seen: "Seen", service: "ServiceState") -> None:
    from rich.table import Table

    out.print(state_line(seen), style="bold")
    card = Table.grid(padding=(0, 2, 0, 0))
    card.add_column(no_wrap=True)
    card.add_column(overflow="fold")
    for what, said in facts(seen, service):
        card.add_row(f"  {what}", said)
    out.print(card)


def state_line(seen: "Seen") -> str:
    """`ready · MODEL · On, +24% · depth 4 · accept 0.71 · 58 tok/s · 1 running`: what is known."""
    parts: list[str] = [FIRST_WORDS.get(seen.condition, seen.condition)]
    if not seen.is_running and seen.at_s is not None:
        from mlx_worker.history import local_time

        word = "after" if seen.condition == "crashed" else "since"
        parts[0] += f" {word} {local_time(seen.at_s)}"
    if seen.status is None:
        parts += [" · ".join(filter(None, model)) for model in seen.models[:1]]
        return " · ".join(parts)
    return " · ".join([*parts, *model_words(first_model(seen.status)), *work_words(seen.status)])


def first_model(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one in memory, else the default."""
    models = status.get("models") or [{}]
    return next((model for model in models if model.get("is_loaded")), models[0])


def model_words(model: Mapping[str, Any]) -> Iterator[str]:
    figures = model.get("measured") or {}
    yield from filter(None, (model.get("id"), model.get("speculation")))
    if figures.get("speedup") is not None:
        yield f"depth {figures['depth']}"
        if figures.get("acceptance") is not None:
            yield f"accept {figures['acceptance']:.2f}"


def work_words(status: Mapping[str, Any]) -> Iterator[str]:
    """How fast it was last, and what it has to do."""
    recent = [reply.get("tokens_per_s") for reply in status.get("recent", ())]
    speeds = [speed for speed in recent if speed is not None]
    if speeds:
        yield f"{speeds[-1]:.0f} tok/s"
    queue = status.get("queue") or {}
    yield f"{queue.get('running', 0)} running"
    if queue.get("waiting"):
        yield f"{queue['waiting']} waiting"


def facts(seen: "Seen", service: "ServiceState") -> Iterator[tuple[str, str]]:
    from mlx_worker.service_cli import condition

    if seen.is_running and seen.address:
        yield "address", seen.address
    if process := ", ".join(process_words(seen)):
        yield "process" if seen.is_running else "was", process
    yield (
        "service",
        service.problem if service.is_installed and service.problem else condition(service),
    )
    if seen.status is not None:
        yield from inner_facts(seen.status)
    if seen.error:
        is_past = not seen.is_running and seen.condition != "never"
        yield "last error" if is_past else "error", seen.error
    elif seen.condition == "crashed":
        yield "last error", NO_WORD
    yield "logs", str(seen.log)
    if step := next_step(seen, service):
        yield "next", step


def process_words(seen: "Seen") -> Iterator[str]:
    if seen.pid is not None:
        yield f"pid {seen.pid}"
    up_s = (seen.status or {}).get("uptime_s")
    if up_s is not None:
        yield f"up {duration(up_s)}"
    if seen.version is not None:
        yield f"version {seen.version}"


def inner_facts(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What only a worker that answers says."""
    if link := status.get("link"):
        yield "gateway", gateway_words(link)
    if power := " · ".join(power_words(status.get("power") or {})):
        yield "power", power
    memory = status.get("memory") or {}
    if "active_bytes" in memory:
        peak = f", at most {size(memory['peak_bytes'])}" if "peak_bytes" in memory else ""
        yield "memory", f"{size(memory['active_bytes'])} in use{peak}"
    if problem := status.get("settings_problem"):
        yield "settings", str(problem)
    for model in status.get("models") or ():
        if problem := model.get("load_problem"):
            yield "not loaded", str(problem)


def gateway_words(link: Mapping[str, Any]) -> str:
    """`connected to HOST as NAME for 3 min`, or how it is else and why."""
    name = f" as {link['name']}" if link.get("name") else ""
    where = (
        f"{link.get('state')}: {link.get('url')}{name}, for {duration(link.get('since_s') or 0)}"
    )
    return f"{where}: {link['why']}" if link.get("why") else where


def power_words(power: Mapping[str, Any]) -> Iterator[str]:
    if power.get("is_on_battery") is not None:
        yield POWER[bool(power["is_on_battery"])]
    if power.get("is_low_power"):
        yield "low power mode"
    if power.get("thermal") is not None:
        yield f"heat {power['thermal']}"


def next_step(seen: "Seen", service: "ServiceState") -> str | None:
    """What helps; None: nothing has to."""
    is_served = service.is_installed and service.problem is None
    start = "mlx-worker service start" if is_served else "mlx-worker serve"
    if seen.condition == "silent":
        end = f"kill {seen.pid}" if seen.pid else "end it where it was started"
        return "mlx-worker service restart" if service.is_running else f"{end}, then {start}"
    if seen.condition == "failing":
        return "mlx-worker service logs"
    if seen.condition == "refused":
        return f"mend that, then {start}"
    is_unknown = seen.condition == "never" and seen.error
    if seen.is_running or service.is_running or is_unknown:
        return None
    return start


def print_unmeasured(out: Any, seen: "Seen", chosen: "Sequence[History]") -> None:
    """The served models of which the decision log has nothing."""
    names = {name for each in chosen if each.parts for name in (each.model, Path(each.model).name)}
    models = (seen.status or {}).get("models", ())
    for model in models:
        if model["id"] not in names:
            out.print()
            out.print(model["id"], style="bold")
            out.print(f"  {unmeasured_words(model)}")


def unmeasured_words(model: Mapping[str, Any]) -> str:
    """Without a word on its draft before one is known."""
    if said := model.get("speculation") or model.get("draft_problem"):
        return str(said)
    is_loaded = model.get("is_loaded")
    return "nothing measured yet" if is_loaded else "not in memory: its first request loads it"


def size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """41 s, 12 min, 3 h 5 min, 2 d 7 h."""
    if seconds < MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < HOUR_S:
        return f"{seconds // MINUTE_S:.0f} min"
    if seconds < DAY_S:
        return f"{seconds // HOUR_S:.0f} h {seconds % HOUR_S // MINUTE_S:.0f} min"
    return f"{seconds // DAY_S:.0f} d {seconds % DAY_S // HOUR_S:.0f} h"
