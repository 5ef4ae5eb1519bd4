"""The command `mlx-worker menubar`: the menu of the worker in the menu bar, or printed.

Owns its flags, and that there is one icon. Leaves the menu to service/. Main thread.
"""

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from mlx_worker.errors import ConfigError
from mlx_worker.terminal import talk

LOCK = "menubar.lock"  # held as long as the icon is there


def add_to(app: typer.Typer) -> None:
    app.command(short_help="Show the worker in this Mac's menu bar.")(menubar)


def menubar(
    is_printed: Annotated[
        bool, typer.Option("--print", help="Write the menu to standard output, on any system.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; with --print.")] = False,
) -> None:
    """Show the worker in the menu bar of this Mac, until Quit; the worker goes on then.

    All that it shows and does, mlx-worker and the worker's console do too.
    """
    if as_json and not is_printed:
        raise ConfigError("--json: needs --print")
    if is_printed:
        print_menu(as_json=as_json)
    elif sys.platform != "darwin":
        hint = "mlx-worker menubar --print prints the menu here"
        raise ConfigError("the menu bar needs macOS", hint=hint)
    else:
        show()


def print_menu(*, as_json: bool) -> None:
    from mlx_worker.service.menubar import menu_of, printed
    from mlx_worker.service.menubar_watch import see

    menu = menu_of(*see())
    sys.stdout.write(json.dumps(asdict(menu), ensure_ascii=False) if as_json else printed(menu))
    if as_json:
        print()


def show() -> None:
    """One icon a folder: a second process ends at once, well, or launchd would start it again."""
    from mlx_worker.config import home
    from mlx_worker.files import try_lock
    from mlx_worker.service import menubar_app

    try:
        lock = try_lock(home() / LOCK)
    except OSError as error:  # the menu itself writes nothing
        talk(f"mlx-worker: {home() / LOCK}: can't be written: {error.strerror}")
        menubar_app.run()
        return
    if lock is None:
        talk("mlx-worker: its icon is in the menu bar already")
        return
    with lock:
        menubar_app.run()
