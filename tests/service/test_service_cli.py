"""mlx-worker service as its user meets it, on a Mac whose launchctl is a stand-in."""

import json
import plistlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_worker import cli, local, service_cli
from mlx_worker.errors import ServiceError
from mlx_worker.local import Seen
from mlx_worker.service import manager
from mlx_worker.service.launchd import LABELS, Launchd
from mlx_worker.service.manager import ServiceState
from mlx_worker.service_cli import verdict
from tests.service.launchctl import NO_PID, UID, Launchctl

Run = Callable[..., tuple[int, str, str]]
READY = Seen("ready", Path("/logs"), pid=NO_PID, address="http://127.0.0.1:8321/", at_s=5.0)
STATE = ServiceState("worker", Path("/x.plist"), True, True, True)


@pytest.fixture
def launchctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launchctl:
    folder = tmp_path / "launchctl"
    folder.mkdir()
    stand_in = Launchctl(folder)
    service = Launchd(launchctl=str(stand_in.path), uid=UID, poll_s=0.001, asked=stand_in.ask)
    monkeypatch.setattr(manager, "manager", lambda: service)
    monkeypatch.setattr(local, "look", lambda: READY)
    return stand_in


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`mlx-worker service …` in this process: exit code, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx-worker", "service", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code or 0
        assert isinstance(code, int)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


# --- install ----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["worker", "menubar"])
def test_a_preview_is_one_plist_and_nothing_else(run: Run, part: str):
    """On any system, without a supervisor."""
    code, out, err = run("install", "--print", "--part", part)
    assert plistlib.loads(out.encode())["Label"] == LABELS[part]  # type: ignore[index]
    assert (code, err) == (0, "")


def test_a_preview_for_linux_is_a_unit(run: Run):
    """Of systemd."""
    code, out, err = run("install", "--print", "--for", "linux")
    assert (code, out.splitlines()[0], err) == (0, "[Unit]", "")


def test_a_preview_writes_no_file(run: Run, home: Path):
    """Neither unit nor folder of logs."""
    run("install", "--print")
    assert not list(home.glob("**/*.plist"))
    assert not (home / ".mlx-worker").exists()


def test_linux_has_no_menubar(run: Run):
    """With what has all of it instead."""
    code, out, err = run("install", "--print", "--for", "linux", "--part", "menubar")
    assert (code, out) == (2, "")
    assert "on macOS alone" in err


def test_install_is_for_this_machine(run: Run):
    """--for says of which system the preview is."""
    code, _, err = run("install", "--for", "linux")
    assert code == 2
    assert "--for: needs --print" in err


def test_install_says_what_it_did_and_how_to_undo_it(run: Run, launchctl: Launchctl):
    """Both parts, the console, and the way back."""
    code, out, err = run("install")
    assert (code, out) == (0, "")
    for part in ("worker", "menubar"):
        assert f"{LABELS[part]}.plist" in err  # type: ignore[index]
        assert f"the {part} starts now and at each login" in err
    assert "its console: http://127.0.0.1:8321/" in err
    assert "mlx-worker service uninstall" in err
    assert len(launchctl.jobs()) == 2


def test_one_part_alone_can_be_installed(run: Run, launchctl: Launchctl):
    """As for a Mac without a screen."""
    run("install", "--part", "worker")
    assert list(launchctl.jobs()) == [LABELS["worker"]]


def test_settings_of_the_terminal_are_named_not_carried(
    run: Run, launchctl: Launchctl, monkeypatch: pytest.MonkeyPatch
):
    """Their names, without the values."""
    monkeypatch.setenv("MLX_WORKER_SERVER__API_KEY", "very-secret-key")
    _, _, err = run("install")
    assert "MLX_WORKER_SERVER__API_KEY: set in this terminal, not for the service" in err
    assert "secret" not in err


def test_over_ssh_install_is_honest(run: Run, launchctl: Launchctl):
    """It fails, saying what is needed."""
    launchctl.change(quirks={"domain": False})
    code, _, err = run("install")
    assert code == 1
    assert "nobody is logged in at this Mac's screen" in err


# --- start and stop ---------------------------------------------------------------------------


def test_stop_says_what_the_next_login_does(run: Run, launchctl: Launchctl):
    """Starts it again, unless it is stopped for good."""
    run("install")
    assert "the next login starts it again" in run("stop")[2]
    assert "it stays so" in run("stop", "--disable")[2]


def test_verbs_are_for_what_is_installed(run: Run, launchctl: Launchctl):
    """A menubar that isn't is no error."""
    run("install", "--part", "worker")
    code, _, err = run("restart")
    assert code == 0
    assert "menubar" not in err


def test_starting_what_runs_says_so(run: Run, launchctl: Launchctl):
    """And isn't an error."""
    run("install", "--part", "worker")
    code, _, err = run("start")
    assert (code, "the worker runs already" in err) == (0, True)


def test_a_menubar_alone_waits_for_no_worker(run: Run, launchctl: Launchctl):
    """Which may be of another folder, or away."""
    run("install", "--part", "menubar")
    code, _, err = run("start")
    assert (code, "console" in err) == (0, False)


def test_nothing_installed_is_said(run: Run, launchctl: Launchctl):
    """By the worker, of which there is always one."""
    code, _, err = run("start")
    assert code == 1
    assert "hint: mlx-worker service install" in err


def test_uninstall_says_what_it_keeps(run: Run, launchctl: Launchctl, home: Path):
    """Settings and policies."""
    run("install")
    code, _, err = run("uninstall")
    assert code == 0
    assert f"{home / '.mlx-worker'}, with its settings, is kept" in err
    assert not list((home / "Library" / "LaunchAgents").iterdir())


# --- what comes of a start --------------------------------------------------------------------


def test_a_start_is_ready_once_its_own_process_is():
    """Not one that answered before."""
    assert "its console: http" in (verdict(READY, replace(STATE, pid=NO_PID), 0.0) or "")
    assert verdict(READY, replace(STATE, pid=7), 0.0) is None


def test_a_start_that_is_refused_says_why():
    """In the worker's words."""
    seen = Seen("refused", Path("/logs"), at_s=5.0, error="config.yaml: no such key: prot")
    with pytest.raises(ServiceError, match=r"can't start: config\.yaml: no such key"):
        verdict(seen, replace(STATE, last_exit=0), 4.0)


def test_a_line_has_one_hint():
    """The worker's own, then how to go on."""
    error = "unknown key: server.prot. hint: did you mean server.port?"
    seen = Seen("refused", Path("/logs"), at_s=5.0, error=error)
    with pytest.raises(ServiceError) as raised:
        verdict(seen, replace(STATE, last_exit=0), 4.0)
    assert str(raised.value).count("hint: ") == 1
    assert str(raised.value).endswith("server.port?; once that is mended, mlx-worker service start")


def test_what_an_earlier_start_said_doesnt_count():
    """The state of before is still there; this one couldn't say why it ended."""
    seen = Seen("refused", Path("/logs"), at_s=5.0, error="old")
    with pytest.raises(ServiceError, match="can't start: mlx-worker service logs shows why"):
        verdict(seen, replace(STATE, last_exit=0), 6.0)


def test_the_last_words_of_one_that_couldnt_write_are_told(folder: Path):
    """As with a full disk: its supervisor kept them."""
    (folder / "service.log").write_text("mlx-worker: no space left\n\n")
    with pytest.raises(ServiceError, match="can't start: no space left"):
        verdict(Seen("never", folder), replace(STATE, last_exit=0), 6.0)


def test_a_moment_without_a_process_is_no_verdict(
    run: Run, launchctl: Launchctl, monkeypatch: pytest.MonkeyPatch
):
    """Right after a start a supervisor may still tell how the last one ended."""
    ended = {"pid": None, "last_exit": 1, "looks": None, "quirk": 0}
    running = launchctl.jobs

    def look() -> Seen:
        """The first look finds none yet; then it is there."""
        jobs = running()
        if jobs[LABELS["worker"]]["last_exit"] is None:
            launchctl.change(jobs={**jobs, LABELS["worker"]: ended})
            return replace(READY, pid=1)
        launchctl.change(jobs={**jobs, LABELS["worker"]: {**ended, "pid": NO_PID}})
        return READY

    monkeypatch.setattr(local, "look", look)
    code, _, err = run("install", "--part", "worker")
    assert (code, "its console" in err) == (0, True)


@pytest.mark.parametrize("last_exit", [0, None])
def test_one_that_is_stopped_while_it_starts_is_said_to(last_exit: int | None):
    """By another command: it could start, and nobody waits for its model any more."""
    seen = Seen("stopped", Path("/logs"), at_s=5.0)
    with pytest.raises(ServiceError, match="was told to stop meanwhile"):
        verdict(seen, replace(STATE, last_exit=last_exit), 4.0)


def test_a_crash_at_each_start_is_said():
    """With its code, and how to end that."""
    seen = Seen("crashed", Path("/logs"))
    with pytest.raises(ServiceError, match="killed by signal 9 and is started again"):
        verdict(seen, replace(STATE, last_exit=-9), 0.0)


def test_a_worker_of_a_terminal_is_told_from_the_service():
    """It has the folder, so the service's ended."""
    with pytest.raises(ServiceError, match=f"another worker runs in this folder, pid {NO_PID}"):
        verdict(READY, replace(STATE, last_exit=0), 0.0)


# --- status -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (replace(STATE, pid=7), "running, pid 7; starts at login"),
        (replace(STATE, is_loaded=False), "stopped; starts at login"),
        (replace(STATE, is_loaded=False, is_enabled=False), "stopped; doesn't start at login"),
        (replace(STATE, last_exit=1), "ended with exit code 1, is started again"),
        (replace(STATE, last_exit=0), "ended by itself"),
        (replace(STATE, is_installed=False), "not installed: mlx-worker service install"),
        (replace(STATE, problem="no systemd"), "installed; whether it runs can't be told"),
        (replace(STATE, is_installed=False, pid=7), "running, pid 7, but its unit is gone"),
    ],
)
def test_each_condition_has_its_line(state: ServiceState, text: str):
    """What it does now, then what a login does."""
    assert text in service_cli.condition(state)


def test_status_is_data(run: Run, launchctl: Launchctl):
    """Lines for people, one JSON object for programs."""
    run("install")
    code, out, _ = run("status")
    assert code == 0
    assert f"worker   running, pid {NO_PID}; starts at login" in out
    line = json.loads(run("status", "--json")[1])
    assert line["supervisor"] == "launchd"
    assert [(part["part"], part["is_running"]) for part in line["parts"]] == [
        ("worker", True), ("menubar", True),
    ]  # fmt: skip


def test_a_worker_of_a_terminal_is_named_beside_the_service(run: Run, launchctl: Launchctl):
    """Else "stopped" reads as if there were no worker."""
    run("install", "--part", "menubar")
    err = run("status")[2]
    assert f"a worker runs in this folder that isn't the service's: pid {NO_PID}, http://" in err


def test_another_folder_than_the_services_is_said(
    run: Run, launchctl: Launchctl, home: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else a terminal with another MLX_WORKER_HOME shows logs of nothing."""
    run("install")
    monkeypatch.setenv("MLX_WORKER_HOME", "/elsewhere")
    err = run("status")[2]
    assert f"the service's folder is {home / '.mlx-worker'}, this terminal's is /elsewhere" in err


# --- logs -------------------------------------------------------------------------------------


@pytest.fixture
def folder(home: Path) -> Path:
    folder = home / ".mlx-worker" / "logs"
    folder.mkdir(parents=True)
    return folder


def test_no_log_yet_says_where_it_will_be(run: Run, home: Path):
    """And fails, since there is nothing to show."""
    code, out, err = run("logs")
    assert (code, out) == (1, "")
    assert f"no log yet: {home / '.mlx-worker' / 'logs' / 'worker.log'}" in err


def test_logs_shows_the_last_lines(run: Run, folder: Path):
    """As many as are asked for."""
    at = "2026-12-01T09:30:12+00:00"
    lines = [json.dumps({"at": at, "level": "INFO", "text": f"line {n}"}) for n in range(9)]
    (folder / "worker.log").write_text("\n".join(lines) + "\n")
    _, out, _ = run("logs", "--lines", "2")
    assert [line[-6:] for line in out.splitlines()] == ["line 7", "line 8"]


def test_the_requests_have_their_own_log(run: Run, folder: Path):
    """A line each."""
    line = {"at": "2026-12-01T09:30:12+00:00", "method": "GET", "path": "/health", "status": 200}
    (folder / "access.log").write_text(json.dumps(line) + "\n")
    assert run("logs", "--access")[1].endswith("GET /health 200\n")


def test_what_never_came_to_the_log_is_shown(run: Run, folder: Path):
    """As the traceback of an environment that is broken."""
    (folder / "service.log").write_text("ModuleNotFoundError: No module named 'mlx'\n")
    code, out, err = run("logs")
    assert (code, out) == (0, "ModuleNotFoundError: No module named 'mlx'\n")
    assert "service.log" in err


def test_a_start_is_told_within_its_time(
    run: Run, launchctl: Launchctl, monkeypatch: pytest.MonkeyPatch
):
    """A model that takes longer to load isn't waited for."""
    monkeypatch.setattr(local, "look", lambda: replace(READY, condition="starting"))
    monkeypatch.setattr(service_cli, "TELLS_S", 0.01)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    code, _, err = run("install")
    assert code == 0
    assert "it loads its model" in err
