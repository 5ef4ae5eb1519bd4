"""`mlx-worker menubar`: printed on any system, an icon on a Mac, one of it alone."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_worker import cli, menubar_cli
from mlx_worker.files import try_lock
from mlx_worker.service import menubar_app

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: exit code, standard output, standard error."""

    def ran(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx-worker", "menubar", *arguments])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        return code or 0, printed.out, printed.err

    return ran


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As on a Mac, with an icon that is quit at once; an entry each time it was shown."""
    icons: list[str] = []
    monkeypatch.setattr(menubar_cli.sys, "platform", "darwin")
    monkeypatch.setattr(menubar_app, "run", lambda: icons.append("icon"))
    return icons


def test_the_menu_of_no_worker_is_printed(run: Run):
    """None ran here yet: that is what it says."""
    code, out, err = run("--print")
    assert (code, err) == (0, "")
    assert out.startswith("mlx-worker: not running [bolt.slash]\n  Not running\n")
    assert "  Open console (disabled)\n" in out


def test_the_menu_is_data_for_programs(run: Run):
    """The same lines, one JSON object."""
    code, out, _ = run("--print", "--json")
    menu = json.loads(out)
    assert code == 0
    assert (menu["title"], menu["items"][0]["key"]) == ("mlx-worker: not running", "state")


def test_json_needs_print(run: Run):
    """The icon has no output."""
    code, _, err = run("--json")
    assert (code, err) == (2, "mlx-worker: --json: needs --print\n")


@pytest.mark.skipif(sys.platform == "darwin", reason="there it shows an icon")
def test_elsewhere_it_says_what_is_possible(run: Run):
    """Exit code 2, as for anything the caller must change."""
    assert run() == (
        2,
        "",
        "mlx-worker: the menu bar needs macOS. hint: mlx-worker menubar --print prints the menu "
        "here\n",
    )


def test_on_a_mac_it_shows_an_icon(run: Run, shown: list[str]):
    """Until it is quit."""
    assert run() == (0, "", "")
    assert shown == ["icon"]


def test_a_second_icon_ends_at_once(run: Run, shown: list[str], home: Path):
    """With 0, or launchd would start it again and again."""
    lock = try_lock(home / ".mlx-worker" / "menubar.lock")
    assert lock is not None
    with lock:
        assert run() == (0, "", "mlx-worker: its icon is in the menu bar already\n")
    assert shown == []


def test_a_folder_that_can_not_be_written_still_has_an_icon(run: Run, shown: list[str], home: Path):
    """The menu writes nothing but its lock."""
    (home / ".mlx-worker").touch()
    code, _, err = run()
    assert (code, shown) == (0, ["icon"])
    assert "can't be written" in err


def test_printing_loads_no_model_library():
    """It looks from outside."""
    script = (
        "import sys; sys.argv = ['mlx-worker', 'menubar', '--print']\n"
        "from mlx_worker import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'mlx', 'mlx_lm', 'transformers', 'aiohttp'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.stdout.splitlines()[-1], ran.stderr) == ("[]", "")
