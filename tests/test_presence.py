"""One `serve` from outside: one worker a folder, what is said of its end, its exit code."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest

from mlx_worker import logs, state
from mlx_worker.errors import ConfigError, ModelError
from mlx_worker.files import locked
from mlx_worker.logs import CAPTURE
from mlx_worker.presence import (
    KEPT_BYTES,
    MAX_CAPTURE_BYTES,
    Presence,
    attended,
    bound_capture,
)
from mlx_worker.service.job import CAPTURES
from tests.workers import STARTS_S

AWKWARD = "wörker 50% $x 'q'"


def phase() -> str | None:
    said = state.read()
    return said and said.phase


def talked(work, *, is_supervised: bool = True) -> tuple[int, list[str]]:
    lines: list[str] = []
    return attended(work, is_supervised=is_supervised, talk=lines.append), lines


def failing(error: Exception):
    def work(_: Presence) -> int:
        raise error

    return work


def test_what_becomes_of_a_worker_is_said(home: Path):
    """At each turn, with what was said before; at its end that it stopped."""

    def work(presence: Presence) -> int:
        assert phase() == "starting"
        presence.say("starting", address="http://127.0.0.1:1/")
        presence.say("ready")
        presence.say(models=(("demo", "On, +24%"),))
        said = state.read()
        assert said is not None
        assert (said.phase, said.address) == ("ready", "http://127.0.0.1:1/")
        assert said.models == (("demo", "On, +24%"),)
        return 0

    assert talked(work) == (0, [])
    assert phase() == "stopped"


@pytest.mark.parametrize("error", [ConfigError("port: taken"), ModelError("m: broken")])
def test_an_error_that_a_restart_cant_mend_ends_with_0(home: Path, error: Exception):
    """Under a supervisor; why is said, kept and logged."""
    assert talked(failing(error)) == (0, [f"mlx-worker: {error}"])
    said = state.read()
    assert said is not None
    assert (said.phase, said.error) == ("refused", str(error))
    assert str(error) in (logs.default_folder() / "worker.log").read_text()


def test_at_a_terminal_it_is_the_callers(home: Path):
    """Which exits with 2; it is kept as well."""
    with pytest.raises(ConfigError):
        talked(failing(ConfigError("port: taken")), is_supervised=False)
    assert phase() == "refused"


def test_a_disk_that_is_full_meanwhile_is_one(home: Path):
    """Started again it would be full again."""
    full = OSError(28, "No space left on device", "/x/decisions")
    code, (line,) = talked(failing(full))
    assert code == 0
    assert line.startswith("mlx-worker: /x/decisions: can't be used: No space left on device.")


@pytest.mark.parametrize("bug", [ZeroDivisionError("x"), OSError(5, "Input/output error")])
def test_a_bug_goes_on_to_whoever_started_it(home: Path, bug: Exception):
    """With a traceback in the log, so that a supervisor starts the worker again."""
    with pytest.raises(type(bug)):
        talked(failing(bug))
    assert phase() == "lost"
    line = json.loads((logs.default_folder() / "worker.log").read_text().splitlines()[-1])
    assert "Traceback" in line["error"]


def test_a_lack_of_memory_is_no_bug(home: Path):
    """It is said as what it is, and may be over at the next start."""
    with pytest.raises(MemoryError):
        talked(failing(MemoryError()))
    said = state.read()
    assert said is not None
    assert (said.phase, (said.error or "").split(":")[0]) == ("lost", "ended for lack of memory")


def test_a_signal_before_anything_listens_is_a_stop(home: Path):
    """As while the model library is imported."""

    def work(_: Presence) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STARTS_S)  # which the signal ends
        return 1

    with pytest.raises(SystemExit) as ended:
        talked(work)
    assert ended.value.code == 0
    assert phase() == "stopped"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_folder_has_one_worker(home: Path):
    """The second is told which; the first goes on undisturbed."""
    with Presence().taken():
        before = state.default_path().read_text()
        code, (line,) = talked(lambda _: 1)
        assert code == 0
        assert f"a worker runs here already: pid {os.getpid()}" in line
        assert state.default_path().read_text() == before


def test_a_worker_whose_lock_was_removed_is_still_the_one(home: Path):
    """Its process is there, as its state says."""
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            began_s = state.began_s(other.pid)
            assert began_s is not None
            said = replace(state.own("ready", "1"), pid=other.pid, process_s=began_s)
            state.write(said)
            code, (line,) = talked(lambda _: 1)
        finally:
            other.kill()
    assert code == 0
    assert f"a worker runs here already: pid {other.pid}" in line


def test_what_a_dead_worker_left_holds_nobody_up(home: Path):
    """Its lock ended with it, whatever its files say."""
    state.write(state.own("ready", "1", address="http://127.0.0.1:1/"))
    state.lock_path().touch()
    assert talked(lambda _: 0) == (0, [])


def test_whoever_looks_at_the_lock_is_waited_for(home: Path):
    """A look holds it for a moment."""
    held, done = Event(), Event()

    def hold() -> None:
        with locked(state.lock_path()):
            held.set()
            done.wait(0.2)

    looking = Thread(target=hold)
    looking.start()
    held.wait(10)
    with Presence().taken():
        assert phase() == "starting"
    looking.join()


def test_a_state_that_cant_be_written_later_stops_nothing(home: Path):
    """It is logged, once."""

    def work(presence: Presence) -> int:
        state.default_path().unlink()
        state.default_path().mkdir()
        presence.say("ready")
        presence.say("ready")
        return 0

    assert talked(work)[0] == 0
    assert (logs.default_folder() / "worker.log").read_text().count("can't be written") == 1


@pytest.mark.parametrize(("before", "error"), [("lost", "stuck"), ("refused", None)])
def test_a_new_start_says_what_ended_the_one_before(
    home: Path, before: state.Phase, error: str | None
):
    """One that crashes again and again is starting most of the time; a refusal was mended."""
    state.write(state.own(before, "1", error="stuck"))
    with Presence().taken():
        said = state.read()
    assert said is not None
    assert (said.phase, said.error) == ("starting", error)


def test_without_its_folder_it_says_nothing(home: Path):
    """As the parts of a worker in other tests."""
    Presence().say("ready")
    assert state.read() is None


# --- service.log ------------------------------------------------------------------------------


def test_what_a_supervisor_kept_is_bounded(home: Path):
    """Its end moves aside, and it goes on in the same file."""
    file = home / CAPTURE
    with file.open("a") as open_by_supervisor:
        open_by_supervisor.write("a line of a start\n" * 60_000)
        open_by_supervisor.flush()
        assert file.stat().st_size > MAX_CAPTURE_BYTES
        bound_capture(file)
        print("new", file=open_by_supervisor, flush=True)
    assert file.read_text() == "new\n"
    kept = file.with_name(f"{CAPTURE}.1").read_text()
    assert KEPT_BYTES / 2 < len(kept) <= KEPT_BYTES
    assert set(kept.splitlines()) == {"a line of a start"}


def test_a_small_one_is_left(home: Path):
    """As is one that isn't there."""
    file = home / CAPTURE
    bound_capture(file)
    file.write_text("x\n")
    bound_capture(file)
    assert [each.name for each in home.glob("service*")] == [CAPTURE]


def test_it_is_the_file_that_a_service_writes():
    """Both name it."""
    assert CAPTURES["worker"] == CAPTURE


# --- as a process -----------------------------------------------------------------------------


def served(place: Path, *flags: str, **options) -> tuple[int, str]:
    """Exit code and the last line of what `serve` says."""
    ran = subprocess.run(
        [sys.executable, "-m", "mlx_worker", "serve", "--port", "0", *flags],
        env={**os.environ, "MLX_WORKER_HOME": str(place)},
        capture_output=True, text=True, timeout=STARTS_S, **options,
    )  # fmt: skip
    assert "Traceback" not in ran.stderr
    return ran.returncode, ran.stderr.splitlines()[-1]


CODES = pytest.mark.parametrize(("flags", "code"), [((), 2), (("--supervised",), 0)])


@CODES
@pytest.mark.parametrize("text", ["server: {quic: 1}\n", "server: [\n"])
def test_a_configuration_that_cant_be_read_is_said(
    home: Path, flags: tuple[str, ...], code: int, text: str
):
    """In a folder with an odd name; the reason is there when somebody looks later."""
    place = home / AWKWARD
    place.mkdir()
    (place / "config.yaml").write_text(text)
    ended, line = served(place, *flags)
    assert ended == code
    assert f"{place}/config.yaml, line " in line
    said = state.read(place / "state.json")
    assert said is not None
    assert (said.phase, f"mlx-worker: {said.error}") == ("refused", line)


@CODES
def test_a_full_disk_is_said(home: Path, flags: tuple[str, ...], code: int):
    """Before anything is loaded. Here no file may grow."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    ended, line = served(home, *flags, preexec_fn=full)
    assert ended == code
    assert f"{home}/state.json: can't be written: " in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_where_nobody_can_be_told_it_isnt_started_again(home: Path):
    """What it prints goes to a file on the same full disk: that is no crash."""
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "mlx_worker", "serve", "--supervised", "--port", "0"],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=full, stderr=full, timeout=STARTS_S,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        )  # fmt: skip
    assert ran.returncode == 0


def test_a_bug_under_a_supervisor_is_a_crash(home: Path):
    """A traceback where the supervisor keeps it, and in the log; the code asks for a new start."""
    script = (
        "import sys\n"
        "from mlx_worker import cli, config\n"
        "def load(*_): raise ZeroDivisionError('a bug')\n"
        "config.load = load\n"
        "sys.argv = ['mlx-worker', 'serve', '--supervised']\n"
        "cli.main()"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "ZeroDivisionError: a bug"
    assert "ZeroDivisionError: a bug" in (logs.default_folder() / "worker.log").read_text()
    said = state.read()
    assert said is not None
    assert (said.phase, said.error) == ("lost", "ended by a bug: ZeroDivisionError: a bug")


@pytest.fixture
def read_only(home: Path) -> Iterator[Path]:
    """A folder that nobody may write into; root only where it may mount one."""
    place = home / AWKWARD
    place.mkdir()
    if os.geteuid() != 0:
        place.chmod(0o500)
        yield place
        place.chmod(0o700)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(place)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("root writes everywhere, and may not mount here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@CODES
def test_a_read_only_folder_is_said(read_only: Path, flags: tuple[str, ...], code: int):
    """With the file, and what to do."""
    ended, line = served(read_only, *flags)
    assert ended == code
    assert f"{read_only}/worker.lock: can't be written: " in line
    assert "hint: make it writable" in line
