"""Keeps the menu true: looks at the worker, and does what is clicked, off the main thread.

Owns when it looks, and that whatever fails becomes a line of the menu. Leaves the lines to
menubar.py and drawing them to menubar_app.py. A thread of its own looks, another one each click
takes; its methods may be called from any thread, and none of them waits.
"""

import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from threading import Event, Lock, Thread

from mlx_worker import local
from mlx_worker.config import home
from mlx_worker.errors import WorkerError
from mlx_worker.local import Seen
from mlx_worker.service import actions, manager
from mlx_worker.service.manager import ServiceState
from mlx_worker.service.menubar import OF_SERVICE, Action, Menu, Verb, first_menu, menu_of

OPEN_S, CLOSED_S = 2.0, 10.0  # between two looks
TAKES_LONG: frozenset[Verb] = frozenset((*OF_SERVICE, "speculation"))


def see() -> tuple[Seen, ServiceState]:
    """What is true now. Blocking, seconds at most."""
    return local.look(), of_this_folder(manager.manager().state("worker"))


def of_this_folder(service: ServiceState) -> ServiceState:
    """One that runs the worker of another folder isn't ours to drive."""
    folder = service.folder
    if not service.is_installed or folder.absolute() == home().absolute():
        return service
    problem = f"the service is of another folder: {folder}. hint: it is driven by mlx-worker there"
    return replace(service, is_installed=False, is_loaded=False, pid=None, problem=problem)


class Watch:
    """menu: the newest one. tell: called from other threads when there is another one."""

    def __init__(
        self,
        tell: Callable[[], None],
        *,
        see: Callable[[], tuple[Seen, ServiceState]] = see,
        perform: Callable[[Action], None] = actions.perform,
        open_s: float = OPEN_S,
        closed_s: float = CLOSED_S,
    ) -> None:
        self.menu: Menu = first_menu()
        self._tell = tell
        self._see, self._perform = see, perform
        self._open_s, self._closed_s = open_s, closed_s
        self._lock = Lock()
        self._is_due = Event()
        self._is_open = self._is_ended = False
        self._seen: tuple[Seen, ServiceState] | None = None
        self._doing: Verb | None = None
        self._problem = self._blind = ""  # of the last click; of looking
        self._logged = ""

    def start(self) -> None:
        """Look from now on. Next: `stop`, unless the process ends."""
        Thread(target=self._run, name="looks", daemon=True).start()

    def stop(self) -> None:
        self._is_ended = True
        self.look_soon()

    def look_soon(self) -> None:
        self._is_due.set()

    def opened(self, is_open: bool) -> None:
        self._is_open = is_open
        self.look_soon()

    def click(self, action: Action) -> None:
        """Do it; what comes of it is in a later menu."""
        with self._lock:
            is_free = self._doing is None or action.verb not in TAKES_LONG
            self._problem = "" if is_free else "not done: another click is still being carried out"
            if is_free and action.verb in TAKES_LONG:
                self._doing = action.verb
        if is_free:
            Thread(target=self._do, args=(action,), name=action.verb, daemon=True).start()
        self._publish()

    def fail(self, error: Exception, what: str = "the menu") -> None:
        """Say it in the menu until the next click, and in the log."""
        with self._lock:
            self._problem = self._noted(error, what)
        self._publish()

    def _noted(self, error: Exception, what: str) -> str:
        """The line of it. The log has it once, also if it goes on every few seconds."""
        line = f"{what}: {str(error) or type(error).__name__}"
        if line != self._logged:
            if not isinstance(error, WorkerError):
                traceback.print_exception(error, file=sys.stderr)
            print(f"mlx-worker: {' '.join(line.split())}", file=sys.stderr, flush=True)
        self._logged = line
        return line

    def _do(self, action: Action) -> None:
        try:
            self._perform(action)
        except Exception as error:  # a bug too: a menu that dies of one tells nothing
            self.fail(error, action.verb)
        with self._lock:
            if action.verb in TAKES_LONG:
                self._doing = None
        self._publish()
        self.look_soon()

    def _run(self) -> None:
        while not self._is_ended:
            self._look()
            self._is_due.wait(self._open_s if self._is_open else self._closed_s)
            self._is_due.clear()

    def _look(self) -> None:
        try:
            self._seen, self._blind = self._see(), ""
        except Exception as error:
            self._blind = self._noted(error, "looking")
        self._publish()

    def _publish(self) -> None:
        """One at a time, so that an older menu never replaces a newer one."""
        with self._lock:
            before, self.menu = self.menu, self._made()
            is_new = self.menu != before
        if is_new:
            self._tell()

    def _made(self) -> Menu:
        problem = self._problem or self._blind
        if self._seen is None:
            return first_menu(problem)
        try:
            return menu_of(*self._seen, doing=self._doing, problem=problem)
        except Exception as error:  # a status of another version that reads otherwise
            return first_menu(self._noted(error, "the worker's status can't be understood"))
