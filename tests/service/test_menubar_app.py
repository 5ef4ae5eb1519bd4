"""The icon and its menu, on a small desktop that fails on what AppKit doesn't take."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mlx_worker.errors import ServiceError
from mlx_worker.local import Seen
from mlx_worker.service import menubar_app
from mlx_worker.service.manager import ServiceState
from mlx_worker.service.menubar import Action
from mlx_worker.service.menubar_watch import Watch
from scripts.menus import ENDED, LOGS, MEASURING, OFF, RUNS, ready
from tests.service.cocoa import Desktop, User

QUIT = "Quit this menu (the worker goes on)"
STOPPED = (Seen("stopped", LOGS), ENDED)


class Worker:
    """What is seen of it, and what was done to it."""

    def __init__(self) -> None:
        self.seen: tuple[Seen, ServiceState] = (ready(), RUNS)
        self.done: list[tuple[Action, str]] = []
        self.error: Exception | None = None
        self.is_seen, self.is_let = threading.Event(), threading.Event()
        self.is_seen.set()
        self.is_let.set()

    def see(self) -> tuple[Seen, ServiceState]:
        assert threading.current_thread() is not threading.main_thread()
        self.is_seen.wait(10)
        return self.seen

    def perform(self, action: Action) -> None:
        self.is_let.wait(10)
        self.done.append((action, threading.current_thread().name))
        if self.error is not None:
            raise self.error


class Mac(Desktop):
    """Runs the menu with a user until it is quit."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = Worker()

    def use(self, user: Callable[["Mac"], User]) -> None:
        self.user = user(self)
        worker = self.worker
        menubar_app.run(
            partial(Watch, see=worker.see, perform=worker.perform, open_s=0.01, closed_s=0.01)
        )


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mac]:
    made = Mac()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield made
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_from_open_to_quit(mac: Mac):
    """It opens, follows the worker, does what is clicked, and outlives the worker."""

    def user(mac: Mac) -> User:
        assert mac.titles() == ["Looking at the worker…", "---", QUIT]
        mac.worker.is_seen.set()
        yield from mac.until_shown("Ready")
        mac.open()
        mac.worker.seen = (ready(MEASURING), RUNS)
        yield from mac.until_shown("Speculative decoding: Measuring")
        mac.close()
        mac.click("Pause speculation")
        yield from mac.until(lambda: len(mac.worker.done) == 1)
        mac.worker.seen = STOPPED
        yield from mac.until_shown("Not running")
        mac.worker.seen = (ready(OFF), RUNS)
        yield from mac.until_shown("Speculative decoding: Off, −18%")
        mac.click("Quit")

    mac.worker.is_seen.clear()
    mac.use(user)
    assert [action for action, _ in mac.worker.done] == [Action("speculation", "off")]


def test_it_has_no_icon_in_the_dock(mac: Mac):
    """An accessory, with one item in the menu bar."""
    mac.use(quitting)
    assert (mac.policy, len(mac.items)) == (1, 1)


def test_the_icon_follows_the_appearance(mac: Mac):
    """A template image is drawn dark or light as the menu bar is; it says what it means."""

    def user(mac: Mac) -> User:
        yield from mac.until_shown("Ready")
        image = mac.icon._image
        assert image is not None
        assert (image._name, image._is_template) == ("bolt.fill", True)
        assert (mac.icon._title, mac.icon._tip) == ("", "mlx-worker: ready")
        mac.click("Quit")

    mac.use(user)


def test_a_system_without_the_symbol_shows_letters(mac: Mac, monkeypatch: pytest.MonkeyPatch):
    """An icon without an image would be there and not be seen."""
    monkeypatch.setattr("tests.service.cocoa.SYMBOLS", set())
    mac.use(quitting)
    assert (mac.icon._image, mac.icon._title) == (None, "MLX")


def test_clicks_are_carried_out_off_the_main_thread(mac: Mac):
    """A stop takes as long as its requests; the menu shows that it is on its way."""

    def user(mac: Mac) -> User:
        mac.worker.is_let.clear()
        yield from mac.until_shown("Stop")
        mac.click("Stop")
        yield from mac.until_shown("Stopping…")
        assert not mac.row("Restart")._is_enabled
        mac.worker.is_let.set()
        yield from mac.until(lambda: "Stopping…" not in mac.titles())
        mac.click("Quit")

    mac.use(user)
    assert mac.worker.done == [(Action("stop"), "stop")]


def test_an_error_becomes_a_line_of_the_menu(mac: Mac, capsys: pytest.CaptureFixture[str]):
    """With its next step; it stays until the next click, and is in the log."""

    def user(mac: Mac) -> User:
        mac.worker.error = ServiceError("launchctl: 5", hint="log out and in")
        yield from mac.until_shown("Stop")
        mac.click("Stop")
        yield from mac.until_shown("stop: launchctl: 5")
        assert mac.titles()[1] == "Next: log out and in"
        mac.worker.error = None
        mac.click("Show logs")
        yield from mac.until(lambda: mac.titles()[0] == "Ready")
        mac.click("Quit")

    mac.use(user)
    assert capsys.readouterr().err == "mlx-worker: stop: launchctl: 5. hint: log out and in\n"


def test_a_bug_while_drawing_ends_nothing(mac: Mac, capsys: pytest.CaptureFixture[str]):
    """It is told in the log, and drawn once it can be; AppKit sees no exception."""

    def user(mac: Mac) -> User:
        yield from mac.until_shown("Ready")
        kept, mac.items[0]._menu._items = mac.menu._items, None  # type: ignore
        mac.items[0]._menu._delegate().changed_(None)  # type: ignore
        mac.items[0]._menu._items = kept  # type: ignore
        yield from mac.until_shown("the menu: ")
        mac.click("Quit")

    mac.use(user)
    assert "Traceback" in capsys.readouterr().err


def test_the_api_address_is_copied(mac: Mac):
    """Ready to be pasted into a client."""

    def user(mac: Mac) -> User:
        yield from mac.until_shown("Copy API address")
        mac.click("Copy API address")
        mac.click("Quit")

    mac.use(user)
    assert mac.copied == "http://127.0.0.1:8321/v1"


def test_lines_that_stay_are_changed_in_place(mac: Mac):
    """An open menu that is made anew would lose what is highlighted."""

    def user(mac: Mac) -> User:
        yield from mac.until_shown("Ready")
        mac.open()
        rows, n_rebuilt = list(mac.menu._items), mac.menu._n_rebuilt
        mac.worker.seen = (ready(OFF), RUNS)
        yield from mac.until_shown("Speculative decoding: Off, −18%")
        assert (mac.menu._items, mac.menu._n_rebuilt) == (rows, n_rebuilt)
        mac.close()
        mac.click("Quit")

    mac.use(user)


def test_checks_indents_and_what_is_disabled_are_drawn(mac: Mac):
    """As the model has them; macOS doesn't enable lines by itself."""

    def user(mac: Mac) -> User:
        yield from mac.until_shown("Ready")
        status: dict[str, Any] = dict(mac.worker.seen[0].status or {})
        status["settings"] = {"speculative_decoding": "off"}
        mac.worker.seen = (replace(ready(), status=status), RUNS)
        yield from mac.until(lambda: mac.row("Pause speculation")._state == 1)
        assert mac.row("Speculative decoding")._level == 1
        assert not mac.row("Ready")._is_enabled
        assert not mac.menu._autoenables
        mac.click("Quit")

    mac.use(user)


def quitting(mac: Mac) -> User:
    yield from mac.until_shown("Ready")
    mac.click("Quit")
