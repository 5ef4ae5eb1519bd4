"""The commands `mlx-worker doctor` and `mlx-worker update`.

Owns their flags, layout and exit codes. Leaves the checks to doctor, the upgrade to update. Main
thread.
"""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from mlx_worker.errors import ConfigError
from mlx_worker.terminal import talk

WORDS = {"ok": "ok", "warning": "warning", "fault": "FAULT"}
LEVEL_WIDTH, NAME_WIDTH = 8, 12
HEAD_WIDTH = LEVEL_WIDTH + NAME_WIDTH + 2  # both, and a space behind each
MIN_ROOM = 30  # for the rest, on the narrowest terminal


def add_to(app: typer.Typer) -> None:
    app.command()(doctor)
    app.command(short_help="Get the newest version in place of this one.")(update)


# --- doctor -----------------------------------------------------------------------------------


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            help="To measure numbers with.", show_default="the default if it fits, else demo"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure no numbers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say what is right and wrong here, and what to do about it.

    Looks at the machine, the models, the service and the gateway, then compares passes over
    several rows with passes over one. Changes nothing, and runs beside a worker. Exits with 1 if
    there is a fault.
    """
    from mlx_worker.doctor.examine import Wishes, examine

    if quick and model is not None:
        raise ConfigError("--model: nothing is measured with --quick", hint="leave one of them out")
    if not quick:
        talk("the last two lines are measured, which takes some seconds")
    checks = examine(Wishes(model, has_probe=not quick))
    if as_json:
        told = list(checks)
        # ASCII: a folder's name may be in no encoding, and a line must be one to any reader.
        print(json.dumps({"checks": [one.as_json() for one in told]}), flush=True)
    else:
        told = list(print_each(checks))
        talk(summary(told))
    raise typer.Exit(1 if any(one.level == "fault" for one in told) else 0)


def print_each(checks: Iterable[Any]) -> Iterator[Any]:
    """A line for each as it comes, and its next step under it."""
    for one in checks:
        print(fitted(line(WORDS[one.level], one.name.replace("_", " "), one.value)), flush=True)
        if one.next_step:
            print(fitted(line("", "", f"→ {one.next_step}")), flush=True)
        yield one


def line(level: str, name: str, value: str) -> str:
    return f"{level:<{LEVEL_WIDTH}} {name:<{NAME_WIDTH}} {' '.join(value.split())}"


def fitted(text: str) -> str:
    """Broken between words where a terminal would do it within them; one line in a pipe."""
    return folded(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text


def folded(text: str, width: int) -> str:
    """What goes on stands under the value."""
    head, value = text[:HEAD_WIDTH], text[HEAD_WIDTH:]
    room = max(width - HEAD_WIDTH, MIN_ROOM)
    lines = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False)
    return head + f"\n{'':{HEAD_WIDTH}}".join(lines)


def summary(told: Iterable[Any]) -> str:
    """2 faults, 1 warning."""
    levels = [one.level for one in told]
    counts = [
        f"{n} {level}{'' if n == 1 else 's'}"
        for level in ("fault", "warning")
        if (n := levels.count(level))
    ]
    return ", ".join(counts) or "all is well"


# --- update -----------------------------------------------------------------------------------


def update() -> None:
    """Get the newest version, in place, and restart the service if it runs.

    However it was installed: by uv, pipx or pip, or as a checkout of its repository. Requests that
    are being answered are finished first.
    """
    from mlx_worker import update as updating

    for line in updating.update():
        talk(line)
