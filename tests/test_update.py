"""`mlx-worker update`: how it was installed is told, and upgraded by what installed it.

Repositories are real git ones. pip, uv and pipx are programs that write down what they are told
and fail on anything that the real ones would not take.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlx_worker import update
from mlx_worker.errors import ConfigError, ServiceError, UpdateFailed
from mlx_worker.service.manager import ServiceState
from mlx_worker.update import Installation, Release

OLD = Release({"mlx-worker": "0.3.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}, "a" * 40)
PROGRAM = """#!{python}
import pathlib, sys
name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
allowed = {{"uv": ["tool", "upgrade", "mlx-worker"], "pipx": ["upgrade", "mlx-worker"]}}
if arguments != allowed[name]:
    sys.exit(f"{{name}}: unexpected {{arguments}}")
pathlib.Path({said!r}).write_text(" ".join([name, *arguments]))
sys.exit({code})
"""


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    command = ["git", *who, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit(folder: Path, **files: str) -> str:
    """Files of these stems with these texts; returns the commit."""
    for stem, text in files.items():
        (folder / f"{stem}.toml").write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one more")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path) -> tuple[Path, Path]:
    """An origin with one commit, and a clone of it."""
    origin, clone = tmp_path / "origin", tmp_path / "clone ü"
    origin.mkdir()
    git(origin, "init", "-q", "-b", "main")
    commit(origin, pyproject="one", other="one")
    git(tmp_path, "clone", "-q", str(origin), str(clone))
    return origin, clone


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where a stand-in for this environment's pip writes what it was asked for."""
    said = tmp_path / "asked"
    script = tmp_path / "pip.py"
    script.write_text(
        "import pathlib, sys\n"
        "is_known = sys.argv[1] in ('--editable', '--upgrade', '--force-reinstall')\n"
        "is_known = is_known or sys.argv[1].startswith(('git+', '/'))\n"
        "if not is_known: sys.exit(f'no such option: {sys.argv[1]}')\n"
        f"with open({str(said)!r}, 'a') as file: print(*sys.argv[1:], file=file)\n"
    )
    monkeypatch.setattr(update, "installer", lambda: [sys.executable, str(script)])
    return said


def program(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> Path:
    """uv or pipx, first in PATH; returns the file that it writes what it was asked for into."""
    place, said = folder / "programs", folder / "asked"
    place.mkdir(exist_ok=True)
    text = PROGRAM.format(python=sys.executable, said=str(said), code=code)
    (place / name).write_text(text)
    (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    return said


# --- how it was installed ---------------------------------------------------------------------


class Installed:
    """A distribution with this direct_url.json."""

    def __init__(self, direct_url: Mapping[str, Any] | None) -> None:
        self._text = json.dumps(direct_url) if direct_url else None

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._text


GIT = {"url": "https://example.org/w.git", "vcs_info": {"vcs": "git", "commit_id": "b" * 40}}


@pytest.mark.parametrize(
    ("receipt", "direct_url", "expected"),
    [
        ("uv-receipt.toml", None, Installation("uv")),
        ("uv-receipt.toml", GIT, Installation("uv", "git+https://example.org/w.git")),
        ("pipx_metadata.json", None, Installation("pipx")),
        (
            "uv-receipt.toml",
            {"url": "file:///a%20b", "dir_info": {"editable": True}},
            Installation("checkout", "/a b"),
        ),
        (None, {"url": "file:///a%20b", "dir_info": {"editable": True}},
         Installation("checkout", "/a b")),
        (None, {"url": "file:///src", "dir_info": {}}, Installation("folder", "/src")),
        (None, GIT, Installation("repository", "git+https://example.org/w.git")),
        (
            None,
            {**GIT, "vcs_info": {**GIT["vcs_info"], "requested_revision": "main"}},
            Installation("repository", "git+https://example.org/w.git@main"),
        ),
        (None, None, Installation("index")),
    ],
)  # fmt: skip
def test_how_it_was_installed_is_told(
    receipt: str | None, direct_url: Any, expected: Installation, tmp_path: Path
):
    """By what each installer leaves behind; a checkout is one whoever installed it."""
    if receipt:
        (tmp_path / receipt).touch()
    found: Any = Installed(direct_url)
    assert update.find(found, tmp_path) == expected


def test_one_file_has_no_newer_version(tmp_path: Path):
    """A wheel that somebody handed over."""
    found: Any = Installed({"url": "file:///w.whl", "archive_info": {}})
    with pytest.raises(ConfigError, match="no newer version"):
        update.find(found, tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "7", '{"url": 7}', '{"vcs_info": "git"}', '{"dir_info": []}', "[" * 100_000],
)
def test_a_direct_url_of_another_form_is_told(text: str):
    """Whoever wrote it."""
    with pytest.raises(ConfigError, match=r"direct_url\.json can't be read"):
        update.direct_url(text)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("git+https://ada:SECRET@h/w.git@main", "git+https://…@h/w.git@main"),
        ("git+https://SECRET@h/w.git", "git+https://…@h/w.git"),
        ("git+ssh://git@h/w.git", "git+ssh://git@h/w.git"),
    ],
)
def test_a_key_in_an_address_is_not_shown(source: str, text: str):
    """Some have one to read a private repository."""
    assert text in update.words(Installation("repository", source))
    assert "SECRET" not in update.way_back(Installation("repository", source), OLD)


# --- one at a time, and to the end ------------------------------------------------------------


def test_a_second_update_is_refused(tmp_path: Path):
    """Two would replace the same files."""
    with (
        update._alone(tmp_path / "mark"),
        pytest.raises(ConfigError, match="an update runs already"),
        update._alone(tmp_path / "mark"),
    ):
        pass


def ends_with(error: BaseException, monkeypatch: pytest.MonkeyPatch, mark: Path) -> Exception:
    """How an update ends of which this comes."""

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(update, "upgrade", fails)
    with (
        update._alone(mark) as held,
        pytest.raises((ConfigError, UpdateFailed)) as raised,
    ):
        update._upgraded(Installation("checkout", "/src"), OLD, held, is_again=False)
    return raised.value


@pytest.mark.parametrize(
    ("error", "is_set"),
    [(KeyboardInterrupt(), True), (UpdateFailed("pip"), True), (ConfigError("offline"), False)],
)
def test_an_update_that_was_cut_short_is_remembered(
    error: BaseException, is_set: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Until one ends; not where nothing was changed."""
    ended = ends_with(error, monkeypatch, tmp_path / "mark")
    with update._alone(tmp_path / "mark") as mark:
        assert mark.is_set is is_set
    assert isinstance(ended, UpdateFailed) is is_set


def test_what_was_cut_short_is_installed_though_nothing_new_came(
    checkout: tuple[Path, Path], asked: Path
):
    """pip failed the last time, say."""
    _, clone = checkout
    update.upgrade(Installation("checkout", str(clone)), OLD, is_again=True)
    assert asked.read_text() == f"--editable {clone}\n"


def test_another_repository_in_the_environment_is_not_pulled(
    checkout: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """GIT_DIR, as where a hook of git's runs it."""
    origin, clone = checkout
    newest = commit(origin, other="two")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    pull(clone)
    monkeypatch.delenv("GIT_DIR")
    assert git(clone, "rev-parse", "HEAD") == newest


def test_an_installer_is_not_run_in_the_users_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A folder `pip` there would be taken for pip."""
    monkeypatch.chdir(tmp_path)
    look = "import os, sys; sys.exit(os.getcwd() != os.path.realpath(sys.prefix))"
    update._run([sys.executable, "-c", look], Installation("index"), OLD)


# --- a checkout -------------------------------------------------------------------------------


def pull(clone: Path) -> None:
    installation = Installation("checkout", str(clone))
    update._check_checkout(clone)
    update.upgrade(installation, OLD)


def test_a_checkout_is_pulled_and_not_installed_again(checkout: tuple[Path, Path], asked: Path):
    """An editable installation sees the new files by itself."""
    origin, clone = checkout
    newest = commit(origin, other="two")
    pull(clone)
    assert (git(clone, "rev-parse", "HEAD"), asked.exists()) == (newest, False)


def test_a_changed_pyproject_is_installed(checkout: tuple[Path, Path], asked: Path):
    """It may need other libraries now."""
    origin, clone = checkout
    commit(origin, pyproject="two")
    pull(clone)
    assert asked.read_text() == f"--editable {clone}\n"


def test_local_changes_that_conflict_stop_the_pull(checkout: tuple[Path, Path]):
    """They are kept, and nothing else is changed."""
    origin, clone = checkout
    commit(origin, other="two")
    before = git(clone, "rev-parse", "HEAD")
    (clone / "other.toml").write_text("mine")
    with pytest.raises(ConfigError, match="would be overwritten"):
        pull(clone)
    assert (git(clone, "rev-parse", "HEAD"), (clone / "other.toml").read_text()) == (before, "mine")


def test_the_files_in_the_way_of_a_pull_are_named(checkout: tuple[Path, Path]):
    """They are what is to be mended."""
    origin, clone = checkout
    commit(origin, other="two")
    (clone / "other.toml").write_text("mine")
    with pytest.raises(ConfigError, match=r": Your local .* by merge: other\.toml\. hint: see"):
        pull(clone)


def test_local_changes_elsewhere_are_kept(checkout: tuple[Path, Path]):
    """They don't stop the pull."""
    origin, clone = checkout
    commit(origin, other="two")
    (clone / "mine.toml").write_text("mine")
    pull(clone)
    assert (clone / "other.toml").read_text() == "two"
    assert (clone / "mine.toml").read_text() == "mine"


def test_a_branch_that_went_another_way_is_refused(checkout: tuple[Path, Path]):
    """Nothing is merged for the user."""
    origin, clone = checkout
    commit(origin, other="two")
    commit(clone, mine="mine")
    with pytest.raises(ConfigError, match="git pull --ff-only"):
        pull(clone)


def test_without_a_branch_or_an_upstream_there_is_nothing_to_pull(checkout: tuple[Path, Path]):
    """Each has its own line."""
    _, clone = checkout
    git(clone, "switch", "-qc", "own")
    with pytest.raises(ConfigError, match="follows no other"):
        pull(clone)
    git(clone, "checkout", "-q", "--detach")
    with pytest.raises(ConfigError, match="no branch is checked out"):
        pull(clone)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path):
    """Unpacked from an archive, most likely."""
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(ConfigError, match="is no git checkout"):
        update._check_checkout(tmp_path)


# --- other installers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "command"),
    [("uv", "uv tool upgrade mlx-worker"), ("pipx", "pipx upgrade mlx-worker")],
)
def test_the_tool_that_installed_it_upgrades_it(
    kind: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the very words that it takes."""
    said = program(tmp_path, kind, monkeypatch)
    update.check(Installation(kind))
    update.upgrade(Installation(kind), OLD)
    assert said.read_text() == command


def test_a_tool_that_fails_ends_with_the_way_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The service still runs the old one."""
    program(tmp_path, "uv", monkeypatch, code=2)
    with pytest.raises(UpdateFailed, match="ended with code 2") as failed:
        update.upgrade(Installation("uv"), OLD)
    assert "uv tool install --force mlx-worker==0.3.0" in str(failed.value)


def test_a_tool_that_is_gone_is_told_before_anything_happens(monkeypatch: pytest.MonkeyPatch):
    """Its environment is there, the program isn't."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="pipx, which installed it, is not in PATH"):
        update.check(Installation("pipx"))


def test_a_repository_is_installed_by_force_then_with_its_libraries(asked: Path):
    """The same version at a newer commit is no upgrade to pip."""
    source = "git+https://example.org/w.git@main"
    update.upgrade(Installation("repository", source), OLD)
    assert asked.read_text() == f"--force-reinstall --no-deps {source}\n{source}\n"


def test_a_python_of_the_system_is_left_to_it(monkeypatch: pytest.MonkeyPatch):
    """PEP 668."""
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(update, "_is_managed", lambda: True)
    with pytest.raises(ConfigError, match="managed by its system"):
        update.check(Installation("index"))


@pytest.mark.parametrize(
    ("installation", "step"),
    [
        (Installation("checkout", "/src"), "git -C /src reset --keep aaaaaaaaaa"),
        (Installation("repository", "git+https://h/w.git@main"), f"git+https://h/w.git@{'a' * 40}"),
        (Installation("repository", "git+ssh://git@h/w.git"), f"git+ssh://git@h/w.git@{'a' * 40}"),
        (Installation("pipx"), "pipx install --force mlx-worker==0.3.0"),
    ],
)
def test_the_way_back_is_one_command(installation: Installation, step: str):
    """For each way of installing."""
    assert step in update.way_back(installation, OLD)


# --- what came of it --------------------------------------------------------------------------


def test_this_installation_is_asked_in_a_new_process(tmp_path: Path, monkeypatch: Any):
    """Whatever lies in the folder where the command is run."""
    (tmp_path / "mlx_worker").mkdir()
    monkeypatch.chdir(tmp_path)
    found = update.release(Installation("index"))
    assert found.versions["mlx-worker"]
    assert update._fresh("-m", "mlx_worker", "--version").strip()


def test_a_new_version_that_does_not_start_is_told_with_the_way_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """And the service is left alone."""
    (tmp_path / "mlx_worker").mkdir()
    (tmp_path / "mlx_worker" / "__init__.py").touch()
    (tmp_path / "mlx_worker" / "__main__.py").write_text("raise ImportError('half of it')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UpdateFailed, match="doesn't start: ImportError: half of it") as failed:
        update._new(Installation("checkout", "/src"), OLD)
    assert "reset --keep" in str(failed.value)


def test_what_changed_is_told():
    """Libraries too; what stayed isn't."""
    new = Release({**OLD.versions, "mlx": "0.33.0"}, "b" * 40)
    assert list(update.news(OLD, new)) == [
        "mlx-worker 0.3.0 (aaaaaaaaaa) → 0.3.0 (bbbbbbbbbb)",
        "mlx 0.32.4 → 0.33.0",
    ]


class Supervisor:
    """A supervisor with the worker in this state; restarting one that doesn't run is a mistake."""

    parts = ("worker",)

    def __init__(self, *, is_running: bool, fails: bool = False) -> None:
        pid = 41 if is_running else None
        self._state = ServiceState("worker", Path("/unit"), is_installed=True, pid=pid)
        self._fails = fails
        self.n_restarts = 0

    def state(self, part: str) -> ServiceState:
        return self._state

    def restart(self, part: str) -> ServiceState:
        assert self._state.is_running
        if self._fails:
            raise ServiceError("it would not end")
        self.n_restarts += 1
        return self._state


@pytest.mark.parametrize(("is_running", "n_restarts"), [(True, 1), (False, 0)])
def test_only_a_service_that_runs_is_restarted(is_running: bool, n_restarts: int):
    """One that was stopped stays so."""
    supervisor = Supervisor(is_running=is_running)
    assert len(list(update._restarted(supervisor))) == n_restarts
    assert supervisor.n_restarts == n_restarts


@pytest.mark.parametrize("is_running", [True, False])
def test_what_stays_the_old_version_is_said(is_running: bool):
    """Where no service was restarted, a worker in a terminal may run on."""
    lines = list(update._told(update._restarted(Supervisor(is_running=is_running))))
    assert (lines == [update.NOT_RESTARTED]) is not is_running


def test_a_restart_that_fails_says_that_the_new_version_is_here():
    """Only the restart is left to do."""
    with pytest.raises(ServiceError, match="the new version is here") as failed:
        list(update._restarted(Supervisor(is_running=True, fails=True)))
    assert failed.value.hint == "mlx-worker service restart"
