"""What a click in the menu does, and how it fails."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_worker import state
from mlx_worker.errors import ServiceError, WorkerError
from mlx_worker.service import manager
from mlx_worker.service.actions import console, logs, perform, set_speculation
from mlx_worker.service.commands import Answer
from mlx_worker.service.menubar import Action, Verb
from tests.answering import answering


class Recorded:
    """A supervisor that takes its verbs for the worker alone."""

    def __init__(self) -> None:
        self.verbs: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        if verb not in ("install", "start", "stop", "restart"):
            raise AttributeError(verb)

        def called(part: str) -> None:
            assert part == "worker"
            self.verbs.append(verb)

        return called


class Opened:
    """Runs nothing; answers as `open` does."""

    def __init__(self, answer: Answer) -> None:
        self.commands: list[Sequence[str]] = []
        self._answer = answer

    def __call__(self, command: Sequence[str]) -> Answer:
        self.commands.append(command)
        return self._answer


@pytest.mark.parametrize("verb", ["install", "start", "stop", "restart"])
def test_the_service_is_driven_by_its_supervisor(verb: Verb, monkeypatch: pytest.MonkeyPatch):
    """The menu never owns a process of the worker."""
    recorded = Recorded()
    monkeypatch.setattr(manager, "manager", lambda: recorded)
    perform(Action(verb))
    assert recorded.verbs == [verb]


def test_the_console_opens_in_the_browser():
    """By open, without a shell."""
    opened = Opened(Answer(0, "", ""))
    perform(Action("console", "http://127.0.0.1:8321/"), opened)
    assert opened.commands == [["/usr/bin/open", "http://127.0.0.1:8321/"]]


@pytest.mark.parametrize("address", ["", "-a Calculator", "file:///etc/passwd", "/bin/sh"])
def test_what_is_no_address_is_not_opened(address: str):
    """state.json is a file, and open takes files and options too."""
    with pytest.raises(WorkerError, match="is no address"):
        console(address)


def test_the_log_opens_in_console(tmp_path: Path):
    """The one with what the worker did."""
    (tmp_path / "worker.log").touch()
    assert logs(tmp_path) == ["/usr/bin/open", "-a", "Console", str(tmp_path / "worker.log")]


def test_a_folder_without_a_log_opens_in_finder(tmp_path: Path):
    """What a supervisor kept may be there."""
    assert logs(tmp_path) == ["/usr/bin/open", str(tmp_path)]


def test_no_log_folder_is_said(tmp_path: Path):
    """None ran yet."""
    with pytest.raises(WorkerError, match="no log yet"):
        perform(Action("logs", str(tmp_path / "none")))


def test_what_open_says_is_told():
    """A Mac without a browser, for one."""
    opened = Opened(Answer(1, "", "No application knows how to open http://h/\n"))
    with pytest.raises(ServiceError, match="No application knows how to open"):
        perform(Action("console", "http://h/"), opened)


def test_a_setting_of_a_worker_that_is_gone_fails_with_a_next_step():
    """It ended between drawing and clicking."""
    with pytest.raises(WorkerError, match="doesn't run any more"):
        perform(Action("speculation", "off"))


def test_a_worker_that_says_no_is_told():
    """Its words come into the menu."""
    with answering() as server:
        state.write(state.own("ready", "1", address=server.address))
        with pytest.raises(WorkerError):
            set_speculation("off")  # this one knows no PATCH
