"""Who may import whom, read from the source; and what must not be imported to answer --help."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx_worker

PACKAGE = Path(mlx_worker.__file__).parent
# Every node but these themselves may import them.
LEAVES = {"records", "config", "config_file", "errors", "files"}

MAY_IMPORT: dict[str, set[str]] = {
    "__init__": {"pair"},
    "__main__": {"cli"},
    "cli": {"worker", "bench", "gateway", "gateway_cli", "service", "models", "pair"}
    | {"config_cli", "models_cli", "terminal", "serving", "decisions", "history", "tables"}
    | {"service_cli", "menubar_cli", "upkeep_cli", "status_cli", "presence"}
    | LEAVES,
    "service_cli": {"service", "local", "logs", "state", "terminal"} | LEAVES,
    "menubar_cli": {"service", "local", "terminal"} | LEAVES,
    "upkeep_cli": {"doctor", "update", "terminal", "tables"} | LEAVES,
    "doctor": {"engine", "bench", "models", "service", "serving", "policies", "local", "power"}
    | {"state", "logs", "ports"}
    | LEAVES,
    "status_cli": {"service", "service_cli", "local", "decisions", "history", "tables", "terminal"}
    | LEAVES,
    "update": {"service"} | LEAVES,
    "local": {"state", "logs"} | LEAVES,
    "state": LEAVES,
    "presence": {"state", "logs"} | LEAVES,
    "activity": set(),
    "config_cli": LEAVES,
    "models_cli": {"models", "bench", "serving", "decisions", "history", "tables", "terminal"}
    | {"local"}
    | LEAVES,
    "gateway_cli": {"gateway", "logs", "terminal"} | LEAVES,
    "terminal": LEAVES,
    "serving": {"models"} | LEAVES,
    "worker": {"http", "server", "link", "engine", "control", "models", "decisions"}
    | {"dispatcher", "roster", "loaded_model", "policies", "serving", "logs", "power"}
    | {"state", "presence", "activity"}
    | LEAVES,
    "dispatcher": {"engine", "roster", "calls", "policies", "power", "activity"} | LEAVES,
    "calls": {"engine", "loaded_model"} | LEAVES,
    "policies": LEAVES,
    "logs": {"config"},
    "power": {"records"},
    "roster": {"engine", "loaded_model", "models"} | LEAVES,
    "server": {"http", "wire", "models"} | LEAVES,
    "link": {"wire", "power"} | LEAVES,
    "gateway": {"http", "wire"} | LEAVES,
    "http": {"wire", "ports"} | LEAVES,
    "ports": LEAVES,
    "pair": {"engine", "loaded_model", "models"} | LEAVES,
    "loaded_model": {"engine", "control", "decisions"} | LEAVES,
    "bench": {"engine", "control", "decisions", "tables"} | LEAVES,
    "history": {"control", "decisions", "tables"} | LEAVES,
    "tables": {"records"},
    "decisions": {"control"} | LEAVES,
    "service": {"local", "state", "logs"} | LEAVES,
    "engine": LEAVES,
    "control": LEAVES,
    "wire": LEAVES,
    "models": {"tables"} | LEAVES,
    "config": {"records", "errors", "files"},
    "config_file": {"config", "errors", "files"},
    "records": set(),
    "errors": set(),
    "files": set(),
}
ONLY_IN = {"mlx": {"engine", "bench"}, "mlx_lm": {"engine", "bench"}}
ONLY_BESIDE_STDLIB: dict[str, set[str]] = {
    "records": set(),
    "errors": set(),
    "files": set(),
    "config": {"pydantic", "yaml"},
    "config_file": {"yaml"},
    "wire": {"pydantic"},
}
NEVER_IN = {"control": {"asyncio", "time", "datetime"}}  # arithmetic only: no loop, no clock
HELP_CPU_S = 0.5


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, at the top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}")
                for alias in node.names
            )


def violations(package: Path) -> list[str]:
    """Every import in the package that the tables above forbid, as "file:line: what"."""
    found = []
    for path in sorted(package.rglob("*.py")):
        node = path.relative_to(package).parts[0].removesuffix(".py")
        may = MAY_IMPORT.get(node)
        for line, name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            top, *rest = name.split(".")
            if may is None or not is_allowed(node, may, top, rest):
                found.append(f"{path.relative_to(package)}:{line}: {node} imports {name}")
    return found


def is_allowed(node: str, may: set[str], top: str, rest: list[str]) -> bool:
    if top == "mlx_worker":
        target = rest[0] if rest else "__version__"
        target = "pair" if target == "load" else target
        return target in {node, "__version__"} or target in may
    if top == "" or node not in ONLY_IN.get(top, {node}) or top in NEVER_IN.get(node, ()):
        return False
    beside = ONLY_BESIDE_STDLIB.get(node)
    return beside is None or top in beside or top in sys.stdlib_module_names


def test_every_import_follows_the_table():
    """A folder imports only the folders that the architecture lets it."""
    assert violations(PACKAGE) == []


def test_a_planted_violation_is_found(tmp_path: Path):
    """The checker sees imports at the top, inside functions, of folders, of libraries, relative."""
    planted = {
        "engine/round.py": "def f():\n    from mlx_worker.wire import openai\n",
        "wire/openai.py": "import aiohttp\n",
        "control/decide.py": "import mlx.core as mx\nimport time\n",
        "decisions.py": "from mlx_worker.engine.load import load_pair\n",
        "gateway/app.py": "from mlx_worker import engine, records\n",
        "records.py": "from mlx_worker.errors import WorkerError\n",
        "pair.py": "from mlx_worker.engine.load import load\nimport mlx_lm\n",
        "service/menubar.py": "from . import launchd\n",
        "newcomer.py": "import os\n",
    }
    for name, source in planted.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    assert violations(tmp_path) == [
        "control/decide.py:1: control imports mlx.core",
        "control/decide.py:2: control imports time",
        "decisions.py:1: decisions imports mlx_worker.engine.load.load_pair",
        "engine/round.py:2: engine imports mlx_worker.wire.openai",
        "gateway/app.py:1: gateway imports mlx_worker.engine",
        "newcomer.py:1: newcomer imports os",
        "pair.py:2: pair imports mlx_lm",
        "records.py:1: records imports mlx_worker.errors.WorkerError",
        "service/menubar.py:1: service imports ..launchd",
        "wire/openai.py:1: wire imports aiohttp",
    ]


def test_the_command_line_loads_no_model_library():
    """mlx_lm takes about 2 s to import, so commands that need no model must not reach it."""
    script = (
        "import sys, mlx_worker.cli, mlx_worker.config, mlx_worker.errors, mlx_worker.records\n"
        "print(sorted({'mlx', 'mlx_lm', 'torch', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_help_answers_within_half_a_second():
    """Best of three, in processor time, so that a busy machine doesn't decide."""

    def help_cpu_s() -> float:
        before = os.times()
        command = [sys.executable, "-m", "mlx_worker", "--help"]
        subprocess.run(command, capture_output=True, check=True)
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])  # the children's user and system time

    assert min(help_cpu_s() for _ in range(3)) < HELP_CPU_S
