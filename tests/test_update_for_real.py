"""`mlx-worker update` of a real checkout in a real environment: git, pip and a new Python.

What is checked out is this package's own folder, with a build backend that needs no network.
"""

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

import mlx_worker
from tests.test_update import git

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

BACKEND = """
import pathlib, tomllib, zipfile

def get_requires_for_build_editable(config_settings=None):
    return []

def build_editable(folder, config_settings=None, metadata_directory=None):
    here = pathlib.Path.cwd()
    project = tomllib.loads((here / "pyproject.toml").read_text())["project"]
    if project["version"] == "0":
        raise SystemExit("it can not be built")
    info, tag = f"mlx_worker-{project['version']}.dist-info", "py3-none-any"
    metadata = f"Metadata-Version: 2.1\\nName: mlx-worker\\nVersion: {project['version']}\\n"
    wheel = f"Wheel-Version: 1.0\\nGenerator: own\\nRoot-Is-Purelib: true\\nTag: {tag}\\n"
    files = {"own.pth": str(here), f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    files[f"{info}/RECORD"] = "".join(f"{name},,\\n" for name in [*files, f"{info}/RECORD"])
    name = f"mlx_worker-{project['version']}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return name
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "mlx-worker"
version = "{version}"
"""


class Place:
    """An origin, a checkout of it in a folder with a space, and an environment that has that."""

    def __init__(self, folder: Path) -> None:
        self.origin, self.checkout = folder / "origin", folder / "a checkout"
        self.prefix, self.home = folder / "an environment", folder / "home"
        self.home.mkdir()
        package = Path(mlx_worker.__file__).parent
        shutil.copytree(package, self.origin / "mlx_worker", ignore=leave_out)
        (self.origin / "backend.py").write_text(BACKEND)
        git(self.origin, "init", "-q", "-b", "main")
        self.release("1")
        git(folder, "clone", "-q", str(self.origin), str(self.checkout))
        venv.create(self.prefix, with_pip=True)
        self.run("-m", "pip", "install", "-q", "--editable", str(self.checkout), check=True)
        self._lend_libraries()

    def _lend_libraries(self) -> None:
        """Those of the environment that runs the tests, after its own."""
        ours = sysconfig.get_path("purelib", vars={"base": str(self.prefix)})
        (Path(ours) / "libraries.pth").write_text(sysconfig.get_path("purelib"))

    def release(self, version: str, main: str | None = None) -> None:
        (self.origin / "pyproject.toml").write_text(PROJECT.format(version=version))
        if main is not None:
            (self.origin / "mlx_worker" / "__main__.py").write_text(main)
        git(self.origin, "add", "-A")
        git(self.origin, "commit", "-qm", version)

    def run(self, *arguments: str, check: bool = False) -> "subprocess.CompletedProcess[str]":
        python = self.prefix / "bin" / "python"
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.home), "PIP_NO_INDEX": "1"}
        return subprocess.run(
            [str(python), *arguments], cwd=self.home, env=environ, capture_output=True, text=True,
            timeout=100, check=check,
        )  # fmt: skip

    def update(self) -> "subprocess.CompletedProcess[str]":
        return self.run("-m", "mlx_worker", "update")


def leave_out(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__" or name.endswith(".safetensors")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


def test_a_checkout_goes_from_release_to_release(place: Place):
    """The newest, a newer one, one that can't be installed, one that doesn't start."""
    ran = place.update()
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    assert "already the newest" in ran.stderr

    place.release("2")
    ran = place.update()
    assert ran.returncode == 0, ran.stderr
    assert "mlx-worker 1 (" in ran.stderr
    assert "→ 2 (" in ran.stderr

    place.release("0")
    ran = place.update()
    assert ran.returncode == 1
    assert "back to the old one" in ran.stderr

    ran = place.update()  # nothing new came, but what came last time isn't installed yet
    assert ran.returncode == 1
    assert "already the newest" not in ran.stderr

    place.release("3")
    ran = place.update()
    assert ran.returncode == 0, ran.stderr
    assert "→ 3 (" in ran.stderr

    place.release("4", "raise ImportError('half of it')\n")
    ran = place.update()
    assert ran.returncode == 1
    assert "the new version doesn't start: ImportError: half of it" in ran.stderr
