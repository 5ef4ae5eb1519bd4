"""What launchd and systemd are told, carried out on real processes by a stand-in for both."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mlx_worker.service import commands, launchd, systemd
from mlx_worker.service.job import Job, job, make_log_folder
from mlx_worker.service.launchd import Launchd
from mlx_worker.service.manager import Manager
from mlx_worker.service.systemd import Systemd
from tests.service.launchctl import UID
from tests.service.supervisor import Supervised, of_unit, supervising, words_of
from tests.workers import wait_until

SCALE = 0.01  # 10 s between starts are 0.1 s
THROTTLED_S = 0.1
AWKWARD = "h 50% ü $x 'q"
# Says when it starts and what it was told; does as the file `then` says: waits, or ends.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
here = Path(os.environ["MLX_WORKER_HOME"])
def told(*_):
    time.sleep(0.1)  # a request that is finished first
    (here / "finished").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
with open(here / "starts", "a") as file:
    file.write(f"{time.monotonic()}\\n")
then = (here / "then").read_text() if (here / "then").exists() else "wait"
if then != "wait":
    sys.exit(int(then))
while True:
    signal.pause()
"""


@pytest.fixture(params=["launchd", "systemd"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def place(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The worker's folder, with a name that must be escaped in every unit."""
    place = home / AWKWARD
    place.mkdir()
    monkeypatch.setenv("MLX_WORKER_HOME", str(place))
    return place


@pytest.fixture
def supervised(home: Path, place: Path) -> Iterator[Supervised]:
    with supervising(home, scale=SCALE) as supervised:
        yield supervised


@pytest.fixture
def service(kind: str, supervised: Supervised, place: Path, monkeypatch: pytest.MonkeyPatch):
    """Installed, with a program in place of the worker, and started."""
    (place / "program.py").write_text(PROGRAM)

    def small(part, system=kind) -> Job:
        return replace(job(part, system), program=(sys.executable, str(place / "program.py")))

    monkeypatch.setattr(launchd, "job", small)
    monkeypatch.setattr(systemd, "job", small)
    if kind == "launchd":
        service: Manager = Launchd(
            launchctl=str(supervised.folder / "launchctl"),
            uid=UID,
            poll_s=0.02,
            asked=supervised.ask,
        )
    else:
        service = Systemd(systemctl=str(supervised.folder / "systemctl"), asked=supervised.ask)
    return service


def starts(place: Path) -> list[float]:
    path = place / "starts"
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def wait_for_start(place: Path, n: int) -> None:
    wait_until(lambda: len(starts(place)) >= n)


def test_a_crash_is_followed_by_a_start(service: Manager, place: Path):
    """Not at once, so that one that always crashes doesn't take the machine."""
    pid = service.install("worker").pid
    wait_for_start(place, 1)
    assert pid
    began_s = psutil.Process(pid).create_time()
    os.kill(pid, signal.SIGKILL)
    wait_for_start(place, 2)
    again = service.state("worker").pid
    assert again not in (None, pid)
    assert psutil.Process(again).create_time() - began_s >= THROTTLED_S * 0.8


def test_one_that_always_crashes_is_said_to(service: Manager, place: Path):
    """It is still supervised, and its last code is known."""
    (place / "then").write_text("3")
    service.install("worker")
    wait_for_start(place, 3)
    wait_until(lambda: not service.state("worker").is_running)
    state = service.state("worker")
    assert (state.is_loaded, state.last_exit) == (True, 3)
    service.stop("worker")
    n = len(starts(place))
    time.sleep(2 * THROTTLED_S)  # nothing to wait for: it must not come
    assert len(starts(place)) == n


def test_an_error_that_a_restart_cant_mend_isnt_looped(service: Manager, place: Path):
    """It exits with 0, and stays away until it is started."""
    (place / "then").write_text("0")
    service.install("worker")
    wait_for_start(place, 1)
    wait_until(lambda: service.state("worker").last_exit == 0)
    time.sleep(2 * THROTTLED_S)  # nothing to wait for: it must not come
    assert len(starts(place)) == 1
    (place / "then").write_text("wait")
    assert service.start("worker").is_running
    wait_for_start(place, 2)


def test_a_stop_lets_it_finish(service: Manager, place: Path):
    """And returns once it is gone."""
    service.install("worker")
    wait_for_start(place, 1)
    state = service.stop("worker")
    assert (place / "finished").exists()
    assert (state.is_running, state.is_enabled) == (False, True)


def test_a_restart_lets_it_finish(service: Manager, place: Path):
    """The new one starts after the old one's end."""
    before = service.install("worker").pid
    wait_for_start(place, 1)
    state = service.restart("worker")
    assert (place / "finished").exists()
    assert state.pid not in (None, before)
    wait_for_start(place, 2)


def test_a_stop_ends_with_the_login(service: Manager, supervised: Supervised, place: Path):
    """The next one starts it again; after a stop for good it doesn't."""
    service.install("worker")
    service.stop("worker")
    assert supervised.ask(["logout"]).is_ok
    assert supervised.ask(["login"]).is_ok
    assert service.state("worker").is_running
    service.stop("worker", is_lasting=True)
    assert supervised.ask(["login"]).is_ok
    assert not service.state("worker").is_loaded
    assert service.start("worker").is_enabled


def test_it_is_removed_whole(service: Manager, supervised: Supervised):
    """No process, no unit, and nothing at the next login."""
    service.install("worker")
    assert service.uninstall("worker")
    state = service.state("worker")
    assert (state.is_installed, state.is_enabled, state.is_running) == (False, False, False)
    assert supervised.ask(["login"]).is_ok
    assert not service.state("worker").is_running


def test_installing_twice_leaves_one(service: Manager, place: Path):
    """The first one is ended, not left beside."""
    service.install("worker")
    wait_for_start(place, 1)
    service.install("worker")
    wait_for_start(place, 2)
    assert (place / "finished").exists()


def test_one_whose_unit_was_deleted_can_still_be_ended(service: Manager):
    """By hand, while it ran: it runs on, is said to, and obeys."""
    service.install("worker").unit.unlink()
    state = service.state("worker")
    assert (state.is_installed, state.is_running) == (False, True)
    assert not service.stop("worker").is_running


def test_one_whose_unit_was_deleted_is_removed_with_its_process(service: Manager):
    """Which would else go on with nothing that names it."""
    service.install("worker").unit.unlink()
    assert service.uninstall("worker")
    assert not service.state("worker").is_running


def test_a_unit_that_was_edited_counts_at_the_next_restart(service: Manager, place: Path):
    """Without another word."""
    unit = service.install("worker").unit
    wait_for_start(place, 1)
    unit.write_text(unit.read_text().replace("program.py", "edited.py"))
    (place / "edited.py").write_text(PROGRAM.replace("starts", "starts_edited"))
    service.restart("worker")
    wait_until((place / "starts_edited").exists)


def test_two_restarts_at_once_both_succeed(service: Manager):
    """Whichever comes second finds it running anew."""
    before = service.install("worker").pid
    with ThreadPoolExecutor(2) as pool:
        states = list(pool.map(lambda _: service.restart("worker"), range(2)))
    assert all(state.problem is None for state in states)
    assert service.state("worker").pid not in (None, before)


# --- unit files -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [AWKWARD, 'a "b" \\c', "100%h", "${HOME}", "ünï 中文"])
def test_a_unit_round_trips_awkward_folders(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Read as systemd reads it: quotes, backslashes, % that names something, $, non-ASCII."""
    folder = tmp_path / name
    monkeypatch.setenv("MLX_WORKER_HOME", str(folder))
    path = tmp_path / "mlx-worker.service"
    path.write_text(systemd.unit_text(job("worker", "linux")), encoding="utf-8")
    spec = of_unit(path, 1.0)
    assert spec.environment["MLX_WORKER_HOME"] == str(folder)
    assert spec.capture == str(folder / "logs" / "service.log")
    assert spec.program == [sys.executable, "-m", "mlx_worker", "serve", "--supervised"]
    assert systemd.named_in(path, systemd.HOME) == folder
    assert systemd.named_in(path, systemd.PROGRAM) == Path(sys.executable)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd's own checker")
@pytest.mark.parametrize("name", [AWKWARD, "100%h ${HOME}"])
def test_systemd_itself_takes_the_unit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its checker has nothing to say, not even a warning."""
    monkeypatch.setenv("MLX_WORKER_HOME", str(tmp_path / name))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "mlx-worker.service"
    path.write_text(systemd.unit_text(job("worker", "linux")), encoding="utf-8")
    command = ["systemd-analyze", "--user", "verify", "--man=no", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_words_are_split_as_systemd_does():
    """Quotes keep a space, a doubled % is one."""
    assert words_of(systemd.quoted('a "b" 5%')) == ['a "b" 5%']


def test_a_program_that_systemd_doesnt_take_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Quotes in its path, whatever they are escaped with."""
    monkeypatch.setattr(sys, "executable", "/opt/a'b/python")
    with pytest.raises(systemd.ConfigError, match="takes of no program"):
        systemd.unit_text(job("worker", "linux"))


def test_without_a_user_manager_the_unit_is_there_all_the_same(tmp_path: Path):
    """Enabled for the next login, and it is said that nothing runs yet."""
    bus = tmp_path / "systemctl"
    bus.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('Failed to connect to bus: None')\n")
    bus.chmod(0o755)
    state = Systemd(systemctl=str(bus)).install("worker")
    assert (state.is_installed, state.is_enabled, state.is_running) == (True, True, False)
    assert "loginctl enable-linger" in (state.problem or "")


def test_a_supervisor_that_hangs_holds_no_status_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """That it doesn't answer is what is known then."""
    monkeypatch.setattr(commands, "LOOKS_S", 0.1)
    hanging = tmp_path / "systemctl"
    hanging.write_text(f"#!{sys.executable}\nimport signal\nsignal.pause()\n")
    hanging.chmod(0o755)
    state = Systemd(systemctl=str(hanging)).state("worker")
    assert "didn't answer within 0.1 s" in (state.problem or "")


def test_the_units_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """XDG_CONFIG_HOME, else ~/.config."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))
    assert tmp_path / "elsewhere" in Systemd(systemctl="/none").state("worker").unit.parents


def test_the_folder_of_its_output_is_made(home: Path):
    """Private; without it no supervisor starts anything."""
    made = job("worker", "linux")
    make_log_folder(made)
    assert made.capture.stat().st_mode & 0o777 == 0o600
