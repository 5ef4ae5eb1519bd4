"""What a click in the menu does: to the service, to the worker's settings, or on the desktop.

Owns how. Leaves when to menubar_watch.py, and copying and quitting to menubar_app.py, since both
are of the desktop's main thread. Blocking, a stop for as long as requests need; any thread.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_worker import local
from mlx_worker.errors import ServiceError, WorkerError
from mlx_worker.logs import OF_WORKER
from mlx_worker.service import manager
from mlx_worker.service.commands import Answer, ask
from mlx_worker.service.menubar import Action

OPEN = "/usr/bin/open"
SETTINGS = "/api/settings"

Run = Callable[[Sequence[str]], Answer]


def perform(action: Action, run: Run = ask) -> None:
    """Raises WorkerError with what went wrong and the next step. run: a command of the desktop."""
    match action.verb:
        case "install":
            manager.manager().install("worker")
        case "start":
            manager.manager().start("worker")
        case "stop":
            manager.manager().stop("worker")
        case "restart":
            manager.manager().restart("worker")
        case "speculation":
            set_speculation(action.value)
        case "console":
            check(run(console(action.value)))
        case "logs":
            check(run(logs(Path(action.value))))
        case _:
            raise AssertionError(f"{action.verb} is done by the menu itself")


def set_speculation(wanted: str) -> None:
    """auto or off, in the worker that runs now: it may listen elsewhere than when it was drawn."""
    seen = local.look()
    if not seen.is_running or seen.address is None:
        raise WorkerError("the worker doesn't run any more", hint="start it first")
    local.ask(seen.address, SETTINGS, method="PATCH", body={"speculative_decoding": wanted})


def console(address: str) -> list[str]:
    """Never a file or an option of `open`. Raises WorkerError."""
    if not address.startswith(("http://", "https://")):
        raise WorkerError(f"{address}: is no address of a console")
    return [OPEN, address]


def logs(folder: Path) -> list[str]:
    """The worker's log in Console, else the folder in Finder. Raises WorkerError."""
    log = folder.absolute() / OF_WORKER[0]
    if log.exists():
        return [OPEN, "-a", "Console", str(log)]
    if folder.is_dir():
        return [OPEN, str(folder.absolute())]
    raise WorkerError(f"no log yet: {folder}", hint="it is there once a worker ran")


def check(answer: Answer) -> None:
    if not answer.is_ok:
        raise ServiceError(answer.line)
