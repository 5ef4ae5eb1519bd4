"""LaunchAgents and what launchctl is told, against a launchctl that fails on what is wrong."""

import errno
import os
import plistlib
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_worker.errors import ConfigError, ServiceError
from mlx_worker.service import launchd
from mlx_worker.service.job import job
from mlx_worker.service.launchd import LABELS, Launchd, check_places, last_exit, printed
from tests.service.launchctl import UID, Launchctl

WORKER = LABELS["worker"]
AWKWARD = 'h 50% "ü" $x <&>'


@pytest.fixture
def launchctl(tmp_path: Path) -> Launchctl:
    folder = tmp_path / "launchctl"
    folder.mkdir()
    return Launchctl(folder)


@pytest.fixture
def service(launchctl: Launchctl) -> Launchd:
    return Launchd(launchctl=str(launchctl.path), uid=UID, poll_s=0.001, asked=launchctl.ask)


def keys_of(service: Launchd, part: Any = "worker") -> dict[str, Any]:
    return plistlib.loads(service.state(part).unit.read_bytes())


# --- the plist --------------------------------------------------------------------------------


def test_a_plist_has_what_the_supervisor_must_do():
    """Started at login, again only after a failure, with time to finish, without a shell."""
    keys = plistlib.loads(launchd.plist(job("worker", "darwin")))
    assert keys["ProgramArguments"] == [
        sys.executable, "-m", "mlx_worker", "serve", "--supervised",
    ]  # fmt: skip
    assert (keys["RunAtLoad"], keys["KeepAlive"]) == (True, {"SuccessfulExit": False})
    assert (keys["ExitTimeOut"], keys["ProcessType"]) == (30, "Interactive")
    assert keys["EnvironmentVariables"]["PYTHONUNBUFFERED"] == "1"
    assert "LimitLoadToSessionType" not in keys


def test_the_menubar_needs_a_screen():
    """Its agent is of the Aqua session alone."""
    keys = plistlib.loads(launchd.plist(job("menubar", "darwin")))
    assert keys["LimitLoadToSessionType"] == "Aqua"
    assert keys["ProgramArguments"][-1] == "menubar"


def test_a_plist_round_trips_awkward_folders(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Spaces, quotes, non-ASCII and what XML escapes."""
    monkeypatch.setenv("MLX_WORKER_HOME", str(home / AWKWARD))
    keys = plistlib.loads(launchd.plist(job("worker", "darwin")))
    assert keys["EnvironmentVariables"]["MLX_WORKER_HOME"] == str(home / AWKWARD)
    assert keys["StandardOutPath"] == str(home / AWKWARD / "logs" / "service.log")


def test_a_key_is_in_no_plist(monkeypatch: pytest.MonkeyPatch):
    """Settings of the terminal that installs aren't carried, since one may hold a key."""
    monkeypatch.setenv("MLX_WORKER_SERVER__API_KEY", "very-secret-key")
    assert b"secret" not in launchd.plist(job("worker", "darwin"))


def test_without_a_folder_of_its_own_it_logs_where_a_mac_has_logs(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """~/Library/Logs, which Console.app shows."""
    monkeypatch.delenv("MLX_WORKER_HOME")
    capture = job("worker", "darwin").capture
    assert capture == home / "Library" / "Logs" / "mlx-worker" / "service.log"


def test_a_folder_that_no_unit_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A line break would begin a new line of a unit file."""
    monkeypatch.setenv("MLX_WORKER_HOME", "/tmp/a\nExecStart=/bin/sh")
    with pytest.raises(ConfigError, match="no unit can hold"):
        job("worker", "linux")


# --- the verbs --------------------------------------------------------------------------------


def test_install_writes_and_loads(service: Launchd, launchctl: Launchctl):
    """One plist, readable, that only its owner may change; then it runs."""
    state = service.install("worker")
    assert (state.is_installed, state.is_enabled, state.is_loaded) == (True, True, True)
    assert state.is_running
    assert state.unit.stat().st_mode & 0o777 == 0o644
    assert launchctl.told() == [("enable", 0), ("bootstrap", 0)]


def test_the_program_itself_is_asked(launchctl: Launchctl):
    """As a process: the other tests here spare its start."""
    service = Launchd(launchctl=str(launchctl.path), uid=UID, poll_s=0.001)
    assert service.install("worker").is_running
    assert not service.stop("worker").is_loaded


def test_installing_again_replaces_the_old_one(service: Launchd, launchctl: Launchctl):
    """Booted out, then bootstrapped, as an upgrade needs."""
    service.install("worker")
    service.install("worker")
    assert launchctl.told()[2:] == [("enable", 0), ("bootout", 0), ("bootstrap", 0)]


def test_a_plist_that_others_may_write_is_mended(service: Launchd):
    """launchd would refuse it."""
    service.install("worker").unit.chmod(0o666)
    assert service.install("worker").is_loaded


def test_a_bootout_is_waited_for(service: Launchd, launchctl: Launchctl):
    """It returns at once, and goes on: a bootstrap meanwhile would fail with 5."""
    launchctl.change(quirks={"leaving": 5})
    service.install("worker")
    service.restart("worker")
    assert launchctl.told()[2:] == [("enable", 0), ("bootout", 0), ("bootstrap", 0)]


def test_a_label_that_isnt_free_yet_is_tried_again(service: Launchd, launchctl: Launchctl):
    """5: Input/output error for some seconds, though print no longer finds it."""
    launchctl.change(quirks={"settling": 3})
    service.install("worker")
    assert service.restart("worker").is_running
    codes = [code for verb, code in launchctl.told() if verb == "bootstrap"]
    assert codes == [0, 5, 5, 5, 0]


def test_a_label_that_never_gets_free_is_said(
    service: Launchd, launchctl: Launchctl, monkeypatch: pytest.MonkeyPatch
):
    """With launchctl's own words and what to do."""
    monkeypatch.setattr(launchd, "SETTLES_S", 0.1)
    service.install("worker")
    service.stop("worker")
    launchctl.change(settling=10_000)
    with pytest.raises(ServiceError, match=r"5: Input/output error. hint: see .* log out and in"):
        service.start("worker")


def test_stop_ends_it_until_the_next_login(service: Launchd):
    """Its plist stays, enabled."""
    service.install("worker")
    state = service.stop("worker")
    assert (state.is_loaded, state.is_enabled, state.is_installed) == (False, True, True)


def test_stop_for_good_survives_a_login(service: Launchd):
    """Disabled until it is started again."""
    service.install("worker")
    assert not service.stop("worker", is_lasting=True).is_enabled
    state = service.start("worker")
    assert (state.is_enabled, state.is_running) == (True, True)


def test_stopping_what_is_stopped_is_no_error(service: Launchd, launchctl: Launchctl):
    """Nothing is told twice."""
    service.install("worker")
    service.stop("worker")
    service.stop("worker")
    assert [verb for verb, _ in launchctl.told()].count("bootout") == 1


def test_starting_what_runs_changes_nothing(service: Launchd, launchctl: Launchctl):
    """Neither bootstrapped, which would fail, nor killed."""
    service.install("worker")
    service.start("worker")
    assert launchctl.told()[2:] == [("enable", 0)]


def test_starting_one_that_ended_kicks_it(service: Launchd, launchctl: Launchctl):
    """It is loaded and doesn't run: an error that a restart couldn't mend ended it."""
    service.install("worker")
    launchctl.change(jobs={WORKER: {"pid": None, "last_exit": 0, "looks": None, "quirk": 0}})
    assert service.state("worker").last_exit == 0
    assert service.start("worker").is_running
    assert ("kickstart", 0) in launchctl.told()


def test_uninstall_leaves_nothing(service: Launchd, launchctl: Launchctl):
    """Neither job, nor plist, nor a label that is disabled."""
    service.install("worker")
    service.stop("worker", is_lasting=True)
    assert service.uninstall("worker")
    assert not service.state("worker").is_installed
    assert (launchctl.jobs(), launchctl.kept["disabled"]) == ({}, [])
    assert not service.uninstall("worker")


@pytest.mark.parametrize("verb", ["start", "stop", "restart"])
def test_what_isnt_installed_is_said(service: Launchd, verb: str):
    """With the command that installs it."""
    with pytest.raises(ServiceError, match=r"isn't installed.*hint: mlx-worker service install"):
        getattr(service, verb)("worker")


def test_without_a_desktop_session_it_is_said(service: Launchd, launchctl: Launchctl):
    """As over ssh to a Mac at which nobody is logged in; the plist is there for later."""
    launchctl.change(quirks={"domain": False})
    with pytest.raises(ServiceError, match="nobody is logged in at this Mac's screen"):
        service.install("worker")
    state = service.state("worker")
    assert state.is_installed
    assert state.problem
    assert "log in there once" in state.problem


def test_root_has_no_service(launchctl: Launchctl):
    """With sudo it would be root's, whom nobody sees log in."""
    with pytest.raises(ConfigError, match="hint: run it without sudo"):
        Launchd(launchctl=str(launchctl.path), uid=0, asked=launchctl.ask).install("worker")


def test_a_python_that_is_gone_is_said(
    service: Launchd, launchctl: Launchctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As after an environment was made anew elsewhere; launchd would try for ever."""
    program = tmp_path / "python"
    program.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(program))
    service.install("worker")
    service.stop("worker")
    program.unlink()
    with pytest.raises(ServiceError, match=r"is gone: .*/python. hint: mlx-worker service install"):
        service.start("worker")


def test_a_bootout_that_is_refused_is_said(service: Launchd, launchctl: Launchctl):
    """At once, in launchctl's words."""
    service.install("worker")
    launchctl.change(quirks={"bootout": 150})
    with pytest.raises(ServiceError, match="Boot-out failed: 150: Operation not permitted"):
        service.stop("worker")


def test_without_launchctl_it_is_said(tmp_path: Path):
    """As on another system."""
    service = Launchd(launchctl=str(tmp_path / "none"), uid=UID)
    assert "No such file" in str(service.state("worker").problem)


def test_state_tells_the_folder_that_the_plist_names(
    service: Launchd, home: Path, monkeypatch: pytest.MonkeyPatch
):
    """A terminal may have another."""
    service.install("worker")
    monkeypatch.setenv("MLX_WORKER_HOME", "/elsewhere")
    assert service.state("worker").home == home / ".mlx-worker"


# --- what launchctl prints --------------------------------------------------------------------


def test_the_lines_of_a_jobs_parts_arent_its_own():
    """Their names recur, in whatever order they come."""
    text = "x = {\n\tendpoints = {\n\t\tpid = 1\n\t}\n\tstate = running\n\tpid = 77\n}\n"
    assert printed(text) == {"state": "running", "pid": "77"}


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"last exit code": "(never exited)"}, None),
        ({"last exit code": "78: EX_CONFIG"}, 78),
        ({"last exit code": "0"}, 0),
        ({"last exit code": "0", "last terminating signal": "Killed: 9"}, -9),
        ({}, None),
    ],
)
def test_how_it_ended_is_read(said: dict[str, str], code: int | None):
    """Codes with and without their names, and signals."""
    assert last_exit(said) == code


# --- where it may not be ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "guarded", ["Documents", "Desktop", "downloads", "Library/Mobile Documents/com~apple"]
)
def test_a_folder_that_macos_keeps_from_services_is_refused(
    service: Launchd, home: Path, monkeypatch: pytest.MonkeyPatch, guarded: str
):
    """Before anything is written; however the name is spelt."""
    monkeypatch.setenv("MLX_WORKER_HOME", str(home / guarded / "worker"))
    with pytest.raises(ConfigError, match=r"macOS keeps ~/.* from services"):
        service.install("worker")
    assert not service.state("worker").is_installed


def test_a_link_into_such_a_folder_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch):
    """What counts is where the files are."""
    (home / "Documents" / "env").mkdir(parents=True)
    (home / "env").symlink_to(home / "Documents" / "env")
    monkeypatch.setattr(sys, "prefix", str(home / "env"))
    with pytest.raises(ConfigError, match=r"this environment is in .*/Documents/env"):
        check_places()


def test_a_folder_beside_them_is_fine(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Documents-of-mine isn't in Documents."""
    monkeypatch.setenv("MLX_WORKER_HOME", str(home / "Documents-of-mine"))
    check_places()


# --- disks that say no ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (errno.ENOSPC, "No space left on device. hint: free some space"),
        (errno.EACCES, r"Permission denied. hint: if it isn't yours: sudo chown \$USER /.*Agents"),
        (errno.EROFS, "Read-only file system. hint: see what is at /.*Agents"),
    ],
)
def test_a_disk_that_says_no_is_a_clear_line(
    service: Launchd, monkeypatch: pytest.MonkeyPatch, code: int, line: str
):
    """And leaves no half a plist."""

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=f"can't be written: {line}"):
        service.install("worker")
    folder = service.state("worker").unit.parent
    assert list(folder.iterdir()) == []


def test_a_folder_that_cant_be_made_is_a_clear_line(service: Launchd, home: Path):
    """A file is where LaunchAgents should be: the same for root as for anyone."""
    (home / "Library").write_text("")
    with pytest.raises(ConfigError, match=r"LaunchAgents.*can't be written"):
        service.install("worker")
