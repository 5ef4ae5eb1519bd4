"""Drift guards: what is written down twice says the same in both places; and errors' wording."""

import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import BlockingError

import mlx_worker
from mlx_worker import errors

ROOT = Path(__file__).parent.parent
PACKAGE = Path(mlx_worker.__file__).parent
HELP_COLUMNS = 80


def fenced_blocks(markdown: str) -> list[str]:
    return re.findall(r"^```[^\n]*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)


def tree_paths(block: str) -> Iterator[str]:
    """Paths in a file tree: "folder/" lines hold the deeper-indented lines below them."""
    folders: list[tuple[int, str]] = []
    for line in block.splitlines():
        drawn = re.match(r"([\s│├└─]*)([\w.-]+(?:/[\w.-]+)*/?)(\s|$)", line)
        if not drawn:
            continue
        depth, name = len(drawn[1]), drawn[2]
        while folders and folders[-1][0] >= depth:
            folders.pop()
        path = "".join(folder for _, folder in folders) + name
        if name.endswith("/"):
            folders.append((depth, name))
        yield path


def readme_blocks() -> list[str]:
    return fenced_blocks((ROOT / "README.md").read_text(encoding="utf-8"))


def help_text(command: list[str]) -> str:
    """What a command's --help prints on a terminal of HELP_COLUMNS without colour."""
    environ = {"COLUMNS": str(HELP_COLUMNS), "TERM": "dumb", "NO_COLOR": "1", "LANG": "C.UTF-8"}
    ran = subprocess.run(
        [sys.executable, "-m", "mlx_worker", *command, "--help"],
        capture_output=True,
        check=True,
        encoding="utf-8",
        env={**environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
    )
    return trimmed(ran.stdout)


def trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()).strip("\n")


def test_a_file_tree_is_read_with_its_folders():
    """The guard below understands indented and drawn trees."""
    indented = "pkg/\n  a.py    first\n  sub/    things\n    b.py\n  c.py  last\n"
    drawn = "pkg/\n├── a.py\n├── sub/\n│   └── b.py\n└── c.py  last\n"
    paths = ["pkg/", "pkg/a.py", "pkg/sub/", "pkg/sub/b.py", "pkg/c.py"]
    assert (list(tree_paths(indented)), list(tree_paths(drawn))) == (paths, paths)


def test_the_readme_tree_lists_every_module():
    """A reader finds each module in the README, and nothing there that is gone."""
    listed = {path for block in readme_blocks() for path in tree_paths(block)}
    listed = {path for path in listed if path.startswith("mlx_worker/") and path.endswith(".py")}
    modules = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    optional = {path for path in modules if path.endswith("__init__.py")}
    assert sorted(modules - optional - listed) == [], "not in the README's tree"
    assert sorted(listed - modules) == [], "in the README's tree, but no such file"


def test_help_in_the_readme_is_the_real_help():
    """Every "$ mlx-worker … --help" block shows what that command prints; the main one is there."""
    shown = {
        match[1].strip(): trimmed(match[2])
        for block in readme_blocks()
        if (match := re.match(r"\$ mlx-worker ?(.*?) ?--help\n(.*)", block, re.DOTALL))
    }
    assert "" in shown, "README has no block that begins with: $ mlx-worker --help"
    for command, text in shown.items():
        assert text == help_text(command.split())


def test_the_changelog_begins_with_this_version():
    """The first released heading of the changelog is the package's version."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[?v?(\d+\.\d+\.\d+\S*?)\]?(?:\s|$)", changelog, re.MULTILINE)
    assert versions[:1] == [mlx_worker.__version__]


def test_the_version_is_written_once():
    """pyproject.toml takes the version from the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "mlx_worker/__init__.py"


@pytest.mark.parametrize("script", ["run", "test", "check", "fix", "bench", "../.ci/run"])
def test_a_script_can_be_run_and_stops_at_the_first_failure(script: str):
    """Scripts are executable, and bash is told to be strict."""
    path = ROOT / "scripts" / script
    assert path.stat().st_mode & 0o111
    assert "\nset -euo pipefail\n" in path.read_text()


async def test_a_sleep_inside_the_event_loop_is_caught():
    """The guard of conftest.py is awake: product code that blocks the loop raises."""
    source = "import time\nasync def planted(): time.sleep(0.001)\n"
    names: dict[str, object] = {}
    exec(compile(source, str(PACKAGE / "planted.py"), "exec"), names)
    planted = names["planted"]
    assert inspect.iscoroutinefunction(planted)
    with pytest.raises(BlockingError, match=r"time\.sleep"):
        await planted()


def test_the_guard_leaves_plain_tests_alone():
    """A test without an event loop runs with the real functions, so MLX is not slowed."""
    import time

    assert type(time.sleep).__name__ == "builtin_function_or_method"


def every_error() -> list[type[errors.WorkerError]]:
    found: list[type[errors.WorkerError]] = [errors.WorkerError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return found


def test_the_table_of_errors_is_the_tree():
    """The table at the top of errors.py has each class with its code, status and retry rule."""
    rows = re.findall(
        r"^ +(\w+) +([a-z_]+) +(\d{3}) +(yes|no)\b", errors.__doc__ or "", re.MULTILINE
    )
    tree = [
        (kind.__name__, kind.code, str(kind.status), "yes" if kind.retryable else "no")
        for kind in every_error()
        if kind is not errors.WorkerError and kind.__module__ == errors.__name__
    ]
    assert sorted(rows) == sorted(tree)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (errors.WorkerError("disk: full"), "disk: full"),
        (
            errors.ContextTooLong(tokens=9120, limit=8192),
            "prompt has 9,120 tokens; this model takes 8,192. "
            "hint: shorten the prompt or lower max_tokens",
        ),
        (
            errors.InvalidParameter("temperature", 3.0, "0 to 2"),
            "temperature: 3.0, must be 0 to 2",
        ),
        (
            errors.UnknownModel("x", ["demo"]),
            "model: 'x', served here: demo",
        ),
        (
            errors.PairMismatch("vocab_size", 256, 512),
            "vocab_size: target has 256, draft has 512. "
            "hint: choose a draft made for this model, or --draft none",
        ),
        (
            errors.CheckpointError("m/config.json", "no such file"),
            "m/config.json: no such file",
        ),
        (
            errors.UnsupportedModel("model_type: 'bert'", ["gemma4"]),
            "model_type: 'bert', supported: gemma4",
        ),
        (
            errors.Overloaded("requests waiting: 8, limit 8", retry_after_s=1.2),
            "requests waiting: 8, limit 8. hint: try again in 2 s",
        ),
    ],
)
def test_an_error_is_one_line_with_value_limit_and_next_step(error: Exception, line: str):
    """str(error) is what a person reads at every door."""
    assert str(error) == line


def test_a_huge_value_is_cut_in_the_message():
    """A 16 MiB parameter must not become a 16 MiB error."""
    assert len(str(errors.InvalidParameter("stop", "x" * 10_000, "short"))) < 150
