"""What keeps the menu true: when it looks, and what becomes of clicks and of failures."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_worker.errors import ServiceError
from mlx_worker.service import manager
from mlx_worker.service.manager import ServiceState
from mlx_worker.service.menubar import Action
from mlx_worker.service.menubar_watch import Watch, of_this_folder, see
from scripts.menus import MEASURING, OFF, RUNS, ready
from tests.workers import wait_until

NEVER_S = 600.0  # a look of itself would come after the test's own limit


def texts(watch: Watch) -> list[str]:
    return [item.text for item in watch.menu.items if item is not None]


def shows(watch: Watch, text: str) -> Callable[[], bool]:
    return lambda: text in texts(watch)


@contextmanager
def watching(**parts: Any) -> Iterator[Watch]:
    watch = Watch(
        parts.pop("tell", lambda: None),
        **{"see": lambda: (ready(), RUNS), "open_s": NEVER_S, "closed_s": NEVER_S, **parts},
    )
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


def test_it_looks_at_once():
    """An icon that says nothing for ten seconds seems broken."""
    with watching() as watch:
        wait_until(shows(watch, "Ready"))


def test_it_looks_when_the_menu_opens():
    """However long ago it looked last."""
    seen = [ready()]
    with watching(see=lambda: (seen[0], RUNS)) as watch:
        wait_until(shows(watch, "Ready"))
        seen[0] = ready(OFF)
        watch.opened(True)
        wait_until(shows(watch, "Speculative decoding: Off, −18%"))


def test_it_looks_more_often_while_the_menu_is_open():
    """What is read must be of now."""
    n_looks = []
    with watching(see=lambda: n_looks.append(1) or (ready(), RUNS), open_s=0.01) as watch:
        wait_until(lambda: len(n_looks) == 1)
        watch.opened(True)
        wait_until(lambda: len(n_looks) > 5)


def test_only_another_menu_is_told_of():
    """A menu bar that is drawn anew every second costs power."""
    told, n_looks, seen = [], [], [ready()]

    def look() -> Any:
        n_looks.append(1)
        return seen[0], RUNS

    with watching(see=look, tell=lambda: told.append(1), closed_s=0.01) as watch:
        wait_until(lambda: len(n_looks) > 5)
        assert len(told) == 1
        seen[0] = ready(MEASURING)
        wait_until(lambda: len(told) == 2)
        assert "Speculative decoding: Measuring" in texts(watch)


def test_a_click_is_followed_by_a_look():
    """What it changed is shown at once."""
    seen = [ready()]

    def perform(action: Action) -> None:
        seen[0] = ready(OFF)

    with watching(see=lambda: (seen[0], RUNS), perform=perform) as watch:
        wait_until(shows(watch, "Ready"))
        watch.click(Action("restart"))
        wait_until(shows(watch, "Speculative decoding: Off, −18%"))


def test_a_second_long_click_waits_for_nobody_and_is_told():
    """A stop and a start at a time would leave it to chance which one is last."""
    is_let, done = threading.Event(), []

    def perform(action: Action) -> None:
        done.append(action.verb)
        is_let.wait(10)

    with watching(perform=perform) as watch:
        watch.click(Action("stop"))
        wait_until(lambda: done == ["stop"])
        watch.click(Action("start"))
        wait_until(shows(watch, "not done: another click is still being carried out"))
        watch.click(Action("logs"))
        wait_until(lambda: done == ["stop", "logs"])
        is_let.set()


def test_a_failure_of_the_world_is_one_line(capsys: pytest.CaptureFixture[str]):
    """In the menu and in the log, without a traceback."""

    def perform(action: Action) -> None:
        raise ServiceError("launchctl said no")

    with watching(perform=perform) as watch:
        watch.click(Action("start"))
        wait_until(shows(watch, "start: launchctl said no"))
    assert capsys.readouterr().err == "mlx-worker: start: launchctl said no\n"


def test_a_bug_in_looking_is_told_and_looking_goes_on(capsys: pytest.CaptureFixture[str]):
    """The menu outlives it."""
    answers: list[Any] = [KeyError("models"), (ready(), RUNS)]

    def look() -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    with watching(see=look) as watch:
        wait_until(shows(watch, "looking: 'models'"))
        watch.look_soon()
        wait_until(lambda: texts(watch)[0] == "Ready")
    assert "Traceback" in capsys.readouterr().err


def test_a_failure_that_goes_on_is_logged_once(capsys: pytest.CaptureFixture[str]):
    """Every few seconds, for days, it would fill the disk."""
    n_looks = []

    def look() -> Any:
        n_looks.append(1)
        raise KeyError("models")

    with watching(see=look, closed_s=0.01):
        wait_until(lambda: len(n_looks) > 3)
    assert capsys.readouterr().err.count("mlx-worker: looking: 'models'") == 1


def test_a_status_that_reads_otherwise_is_told(capsys: pytest.CaptureFixture[str]):
    """As of a worker of a later version; the menu goes on and can be quit."""
    strange = replace(ready(), status={"models": 3})
    with watching(see=lambda: (strange, RUNS)) as watch:
        wait_until(lambda: "can't be understood" in texts(watch)[0])
        assert watch.menu.action("quit") is not None
    assert "Traceback" in capsys.readouterr().err


def test_a_service_of_another_folder_is_not_ours_to_drive(home: Path):
    """Its verbs would end somebody else's worker."""
    other = replace(RUNS, home=home / "other")
    seen = of_this_folder(other)
    assert (seen.is_installed, seen.is_running) == (False, False)
    assert str(home / "other") in (seen.problem or "")


def test_a_service_of_this_folder_is_ours(home: Path):
    """As is one that isn't installed."""
    ours = replace(RUNS, home=home / ".mlx-worker")
    assert of_this_folder(ours) == ours
    absent = ServiceState("worker", Path("/unit"), is_installed=False)
    assert of_this_folder(absent) == absent


def test_an_unnamed_folder_is_the_usual_one(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a service that was installed without MLX_WORKER_HOME."""
    assert of_this_folder(RUNS) == RUNS  # the tests' home is the usual folder of their HOME
    monkeypatch.setenv("MLX_WORKER_HOME", str(home / "elsewhere"))
    assert of_this_folder(RUNS).problem is not None


def test_seeing_asks_worker_and_supervisor(monkeypatch: pytest.MonkeyPatch):
    """Of a folder in which none ever ran."""

    class Manager:
        def state(self, part: str) -> ServiceState:
            return ServiceState("worker", Path("/unit"), is_installed=False)

    monkeypatch.setattr(manager, "manager", Manager)
    seen, service = see()
    assert (seen.condition, service.is_installed) == ("never", False)
