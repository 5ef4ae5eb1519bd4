"""The command as a user meets it.

Real processes with real output streams where the process is the point: what it prints at its ends,
what it loads, how it is interrupted. Elsewhere the same command is run in this process, which
spares importing the model libraries each time.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mlx_worker import cli
from mlx_worker.control.controller import Controller
from mlx_worker.decisions import DecisionLog, read
from mlx_worker.history import percent
from tests.courses import EVENTS, curve, eventful_course, serve
from tests.pulled import pull, store_in

SMALL_BENCH = (
    "bench --workloads count,chat --requests 1 --depths 0,2 --max-tokens 16 --temperature 0"
).split()
COUNT = "Count from 3 in steps of 4, 10 numbers."


def run(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """One mlx-worker command, both streams piped."""
    return subprocess.run(
        [sys.executable, "-m", "mlx_worker", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
    )


Here = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """As run(), in this process: called with the arguments and what stands on standard input."""

    def run_here(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["mlx-worker", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        status = 0
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code
        assert isinstance(status, int)
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, printed.out, printed.err)

    return run_here


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One small bench of the demo pair, with its JSON file and picture."""
    folder = tmp_path_factory.mktemp("bench")
    files = ["--json", str(folder / "bench.json")]
    ran = run(*SMALL_BENCH, *files, MLX_WORKER_HOME=str(folder))
    return {"ran": ran, "file": folder / "bench.json"}


# --- help and errors --------------------------------------------------------------------------


def test_help_lists_the_commands_that_exist():
    """And exits 0, with nothing on standard error."""
    ran = run("--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    for command in ("bench", "generate", "status", "config"):
        assert f"\n  {command} " in ran.stdout


@pytest.mark.parametrize("command", ["bench", "generate", "status", "config"])
def test_every_command_has_help(command: str):
    """Within 80 columns."""
    ran = run(command, "--help", COLUMNS="80")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert max(map(len, ran.stdout.splitlines())) <= 80


def test_the_version_is_printed():
    """For bug reports."""
    import mlx_worker

    assert run("--version").stdout == f"{mlx_worker.__version__}\n"


ERRORS = [
    (["bench", "--requests", "1", "--modes", "fast"], "no mode is called 'fast'"),
    (["bench", "--depths", "one"], "--depths: 'one', must be whole numbers"),
    (["bench", "--depths", "9"], "--depths: 9, must be 0 to 8"),
    (["bench", "--live", "--depths", "1"], "--depths: '1', can't be combined with --live"),
    (["bench", "--live", "--modes", "auto"], "--modes: 'auto', can't be combined with --live"),
    (["bench", "--live", "--plot", "x.png"], "--plot: 'x.png', can't be combined with --live"),
    (["bench", "--live", "--max-tokens", "1"], "--max-tokens: 1, must be at least 2"),
    (["bench", "--modes", "off,auto", "--max-tokens", "1"], "--max-tokens: 1, must be at"),
    (["bench", "--workloads", "chess"], "--workloads: no prompts for 'chess'"),
    (["bench", "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl: No such file"),
    (
        ["bench", "--json", "/nowhere/x.json"],
        "--json: /nowhere/x.json can't be written: No such file",
    ),
    (
        ["bench", "--plot", "/nowhere/x.png"],
        "--plot: /nowhere/x.png can't be written: No such file",
    ),
    (["bench", "--json", "/proc/x.json"], "--json: /proc/x.json can't be written"),
    (["bench", "/nowhere/model"], "/nowhere/model"),
    (["generate", "--model", "/nowhere/model", "Hi"], "/nowhere/model"),
    (["generate", "  "], "PROMPT: is empty"),
    (["status", "--model", "m"], "--model: nothing measured for 'm'. hint: known: none"),
    (["config", "show"], "config.yaml, line 2: unknown key: speculation.dept"),
]
A_FEW_ERRORS = [ERRORS[n] for n in (1, -4, -2, -1)]


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_what_the_caller_must_change_is_one_line_and_exit_2(
    arguments: list[str], message: str, home: Path, here: Here
):
    """Flags, files, models, configuration: no traceback, nothing on standard output."""
    assert_is_one_line_and_exit_2(here, arguments, message, home)


@pytest.mark.parametrize(("arguments", "message"), A_FEW_ERRORS)
def test_a_process_that_fails_prints_one_line_too(arguments: list[str], message: str, home: Path):
    """One of each command; of them generate imports the model libraries, which may talk, too."""
    assert_is_one_line_and_exit_2(run, arguments, message, home)


def assert_is_one_line_and_exit_2(run: Here, arguments: list[str], message: str, home: Path):
    if arguments[0] == "config":
        (home / ".mlx-worker").mkdir()
        (home / ".mlx-worker" / "config.yaml").write_text("speculation:\n  dept: 3\n")
    ran = run(*arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    *_, line = ran.stderr.splitlines()
    assert line.startswith("mlx-worker: ")
    assert message in line
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("arguments", [["bench", "--nonsense"], ["generate"], ["nonsense"]])
def test_a_wrong_command_line_is_exit_2_with_the_way_to_help(arguments: list[str]):
    """From the argument parser itself."""
    ran = run(*arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "--help" in ran.stderr


# --- config -----------------------------------------------------------------------------------


def test_a_setting_is_changed_in_the_file(home: Path, here: Here):
    """It says what is set, and when it counts; --unset takes it back."""
    file = home / ".mlx-worker" / "config.yaml"
    ran = here("config", "set", "server.port", "9000")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "server.port: 9000, from the worker's next start on\n"
    assert file.read_text() == "server:\n  port: 9000\n"
    assert "port: 9000" in here("config", "show").stdout
    ran = here("config", "set", "server.port", "--unset")
    assert ran.stdout == "server.port is at its default again, from the worker's next start on\n"
    assert "port: 8321" in here("config", "show").stdout


def test_a_setting_is_read_from_standard_input(home: Path, here: Here):
    """A list over several lines, for instance."""
    ran = here("config", "set", "models", "-", stdin="- id: demo\n  draft: none\n")
    assert ran.returncode == 0
    text = (home / ".mlx-worker" / "config.yaml").read_text()
    assert text == "models: [{id: demo, draft: none}]\n"


def test_a_key_is_never_an_argument_and_never_shown(home: Path, here: Here):
    """Whoever lists processes, or reads the history of a shell, would see it."""
    file = home / ".mlx-worker" / "config.yaml"
    ran = here("config", "set", "server.api_key", "hunter2-hunter2")
    assert ran.returncode == 2
    assert "hint: mlx-worker config set server.api_key - reads it from standard input" in ran.stderr
    assert "hunter2" not in ran.stderr
    assert not file.exists()
    ran = here("config", "set", "server.api_key", "-", stdin="hunter2-hunter2\n")
    assert ran.stdout == "server.api_key: ********, from the worker's next start on\n"
    assert file.read_text() == "server:\n  api_key: hunter2-hunter2\n"
    assert file.stat().st_mode & 0o777 == 0o600


# --- models -----------------------------------------------------------------------------------


def test_the_demo_pair_is_used_for_want_of_a_model_and_said(
    here: Here, monkeypatch: pytest.MonkeyPatch
):
    """With the one command that gets a model that fits this machine."""
    monkeypatch.setenv("MLX_WORKER_LIMITS__MEMORY_GB", "64")
    ran = here("generate", COUNT, "--max-tokens", "4", "--temperature", "0")
    assert "no model here yet: using the embedded demo pair" in ran.stderr
    assert re.search(r"mlx-worker pull gemma-4-\S+\n", ran.stderr)
    named = here("generate", COUNT, "--max-tokens", "4", "--temperature", "0", "--model", "demo")
    assert "pull" not in named.stderr
    assert named.stdout == ran.stdout


def test_a_model_that_was_pulled_is_the_default_everywhere(home: Path, here: Here):
    """With the draft that was pulled with it."""
    pull(store_in(home), "mine")
    ran = here("generate", COUNT, "--max-tokens", "8", "--speculation", "on")
    assert "drafted by owner/mine-draft (assistant)" in ran.stderr
    assert "demo pair" not in ran.stderr
    ran = here("bench", "--workloads", "count", "--requests", "2", "--max-tokens", "4",
              "--draft", "owner/mine-draft", "--depths", "0,1")  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert (found["model"], found["draft"]) == ("mine", "owner/mine-draft")


def test_what_an_entry_says_counts_for_one_reply(here: Here, monkeypatch: pytest.MonkeyPatch):
    """As it does for a worker."""
    entry = "[{id: demo, draft: none, context_tokens: 50, sampling: {temperature: 0}}]"
    monkeypatch.setenv("MLX_WORKER_MODELS", entry)
    ran = here("generate", COUNT, "--max-tokens", "8")
    assert (ran.returncode, ran.stdout) == (0, here("generate", COUNT, "--max-tokens", "8").stdout)
    assert "must be below 50, the context" in here("generate", COUNT, "--max-tokens", "60").stderr


@pytest.mark.parametrize("command", [["generate", "Hi", "--model"], ["bench"]])
def test_a_model_that_is_not_here_is_said_with_how_to_get_it(command: list[str], here: Here):
    """A short name, or an id; and what a misspelt name might have been."""
    assert "hint: mlx-worker pull gemma-4-e2b" in here(*command, "gemma-4-e2b").stderr
    assert "hint: mlx-worker pull owner/name" in here(*command, "owner/name").stderr
    assert "did you mean gemma-4-e2b?" in here(*command, "gemma-4-e2").stderr


# --- status -----------------------------------------------------------------------------------

START_S = 1_796_000_000.0  # 2026-11-30 00:53:20 UTC


@pytest.fixture
def decided(home: Path) -> list[dict[str, Any]]:
    """The home's decision log holds a course with every verdict in it; returns its requests."""
    seed, _ = eventful_course()
    facts = {"model": "org/large", "draft": "org/small"}
    log = DecisionLog(home / ".mlx-worker" / "decisions", facts, now_s=lambda: START_S)
    controller = Controller(curve=curve(seed), seed=seed, on_concluded=log.hear)
    log.attach(controller)
    serve(70, controller, seed=seed, start_s=START_S, **EVENTS)
    log.close()
    (history,) = read(home / ".mlx-worker" / "decisions")
    return history.parts[0].requests


def test_status_without_a_measurement_says_what_to_do(here: Here):
    """Exit 0: it is an answer. For a program it is an empty list."""
    ran = run("status")
    assert (ran.returncode, ran.stderr) == (0, "")
    worker, _, measured = ran.stdout.partition("\n\n")
    assert worker.startswith("never started\n")
    assert measured.startswith("nothing measured yet\n")
    assert "mlx-worker bench" in measured
    assert here("status", "--history").stdout == measured
    assert json.loads(here("status", "--json").stdout)["models"] == []
    assert here("status", "--json", "--history").stdout == ""


def test_status_shows_the_last_verdict_and_why(decided: list[dict[str, Any]]):
    """The text of the contract, then what it rests on, in local time."""
    last = decided[-1]["status"]
    ran = run("status", TZ="UTC")
    assert (ran.returncode, ran.stderr) == (0, "")
    measured = ran.stdout.partition("\n\n")[2]  # after what the worker does
    title, text, *rest = (line.strip() for line in measured.splitlines())
    assert (title, text) == ("org/large with org/small", last["text"])
    shown = dict(re.split(r" {2,}", line, maxsplit=1) for line in rest if "  " in line)
    low, high = percent(last["low"])[:-1], percent(last["high"])
    assert shown["speed-up"].endswith(f", 90% interval {low} to {high}")
    assert shown["depth"] == str(last["depth"])
    assert shown["acceptance"] == f"{last['acceptance']:.2f}"
    assert shown["tokens per round"] == f"{last['tokens_per_round']:.2f}"
    assert shown["cost per round"] == f"{last['cost']:.2f} plain steps"
    assert shown["measured on"] == f"{last['requests']} requests, {last['tokens']:,} tokens"
    assert f"{abs(last['loss']):,.0f} plain steps, " in shown["loss so far"]
    assert re.fullmatch(r"2026-11-30 0[0-2]:\d\d:\d\d", shown["since"])
    assert shown["last request"].endswith(f", number {decided[-1]['number']}")
    assert last["why"].startswith(shown["why"])
    assert run("status", TZ="UTC-3").stdout.count("2026-11-30 0") == 2
    assert run("status", TZ="UTC-3").stdout != ran.stdout


def test_status_as_json_is_the_record_of_the_last_request(
    decided: list[dict[str, Any]], here: Here
):
    """One line with all keys of Status and its text."""
    (line,) = here("status", "--json").stdout.splitlines()
    (found,) = json.loads(line)["models"]
    assert (found["id"], found["draft"]) == ("org/large", "org/small")
    assert found["speculation"] == decided[-1]["status"]
    assert found["last_request_s"] == decided[-1]["begun_s"]


def test_history_has_every_request_and_every_change_of_mind(decided: list[dict[str, Any]]):
    """Within 80 columns, without colour in a pipe; plain requests in a row are one row."""
    ran = run("status", "--history", COLUMNS="200")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert max(map(len, ran.stdout.splitlines())) <= 80
    assert "\x1b" not in ran.stdout
    rows = re.findall(r"^\d\d-\d\d \d\d:\d\d +(\d+)(?:–(\d+))? ", ran.stdout, re.MULTILINE)
    numbers = [n for first, last in rows for n in range(int(first), int(last or first) + 1)]
    assert numbers == sorted(line["number"] for line in decided)
    assert len(rows) < len(decided)
    states = [line["status"]["state"] for line in decided]
    changes = re.findall(r"^→ (.+?): ", ran.stdout, re.MULTILINE)
    assert changes == [
        after["status"]["text"]
        for before, after in pairwise(decided)
        if before["status"]["state"] != after["status"]["state"]
    ]
    assert len(changes) >= len(set(states)) - 1


def test_history_as_json_is_a_line_a_request(decided: list[dict[str, Any]], here: Here):
    """As in the log, without the rounds."""
    lines = [json.loads(line) for line in here("status", "--history", "--json").stdout.splitlines()]
    assert [line["number"] for line in lines] == [line["number"] for line in decided]
    assert [line["status"] for line in lines] == [line["status"] for line in decided]
    assert "segments" not in lines[0]


def test_status_can_be_of_one_model(decided: list[dict[str, Any]], here: Here):
    """By its id or the last part of it; another name is an error that lists what there is."""
    full, short = here("status", "--model", "org/large"), here("status", "--model", "large")
    assert full.stdout == short.stdout
    assert here("status").stdout.partition("\n\n")[2] == full.stdout
    other = here("status", "--model", "org")
    assert other.returncode == 2
    assert "known: org/large" in other.stderr


def test_status_says_how_many_lines_it_left_out(home: Path, decided: list[dict[str, Any]]):
    """On standard error; the rest is shown."""
    (file,) = (home / ".mlx-worker" / "decisions").glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-50])
    ran = run("status", "--json")
    assert ran.stderr == "mlx-worker: 1 line of the decision log could not be read\n"
    (found,) = json.loads(ran.stdout)["models"]
    assert found["last_request_s"] == decided[-2]["begun_s"]


def test_status_loads_no_model_library(decided: list[dict[str, Any]]):
    """It only reads files."""
    script = (
        "import sys\n"
        "from mlx_worker.cli import app\n"
        "app(['status'], standalone_mode=False)\n"
        "print(sorted({'mlx', 'mlx_lm', 'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.stdout.splitlines()[-1], ran.stderr) == ("[]", "")


# --- config -----------------------------------------------------------------------------------


def test_config_prints_the_folder(home: Path):
    """Standard output holds the path alone, so that a script can use it."""
    assert run("config").stdout == f"{home / '.mlx-worker'}\n"


def test_config_show_prints_the_settings_in_force():
    """The environment is over the file and the defaults."""
    import yaml

    ran = run("config", "show", MLX_WORKER_SPECULATION__DEPTH="4")
    assert yaml.safe_load(ran.stdout)["speculation"]["depth"] == 4


def test_config_show_masks_the_key():
    """A screenshot of the settings gives nothing away."""
    import yaml

    ran = run("config", "show", MLX_WORKER_SERVER__API_KEY="hunter2-hunter2")
    assert (ran.returncode, "hunter2" in ran.stdout + ran.stderr) == (0, False)
    assert yaml.safe_load(ran.stdout)["server"]["api_key"] == "**********"
    ran = run("config", "show")
    assert yaml.safe_load(ran.stdout)["server"]["api_key"] is None
    ran = run("config", "show", MLX_WORKER_SERVER__API_KEY="hunter2")
    assert (ran.returncode, "hunter2" in ran.stdout + ran.stderr) == (2, False)


# --- bench ------------------------------------------------------------------------------------


def test_the_last_line_of_bench_is_its_json(bench: dict[str, Any]):
    """With the promised keys, and the same in the file."""
    ran = bench["ran"]
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result.keys() >= {"machine", "model", "draft", "modes", "requests", "verdict", "work"}
    assert json.loads(bench["file"].read_text(encoding="utf-8")) == result
    arms = [(row["mode"], row["depth"], row["workload"]) for row in result["modes"]]
    kinds = ("count", "chat", "all")
    assert arms == [(*arm, kind) for arm in (("off", 0), ("assistant", 2)) for kind in kinds]


def test_the_draft_leaves_the_text_alone(bench: dict[str, Any]):
    """Greedy and coupled: every request reads the same in every arm."""
    requests = json.loads(bench["ran"].stdout.splitlines()[-1])["requests"]
    assert [one["same_text"] for one in requests] == [True, True]
    assert all(one["output_tokens"] <= 16 for one in requests)


def test_the_verdict_of_bench_is_never_measuring(bench: dict[str, Any]):
    """On or Off, the printed one and the one in the JSON alike."""
    lines = bench["ran"].stdout.splitlines()
    text = json.loads(lines[-1])["verdict"]["text"]
    assert text.startswith(("On, +", "Off, "))
    assert any(line.startswith(f"Verdict   {text} ") for line in lines)


def test_a_pipe_gets_no_progress_bar_and_no_colour(bench: dict[str, Any]):
    """And the talk is on standard error: the demo pair is named there."""
    ran = bench["ran"]
    assert "\x1b" not in ran.stdout + ran.stderr
    assert "\r" not in ran.stdout + ran.stderr
    assert ran.stderr.splitlines()[0].startswith("no model here yet: using the embedded demo pair")


def test_bench_serves_the_prompts_of_a_file(tmp_path: Path, here: Here):
    """Under its own workload names; lookup needs no draft weights."""
    file = tmp_path / "mine.jsonl"
    file.write_text(
        "".join(
            json.dumps({"workload": "mine", "messages": [{"role": "user", "content": text}]}) + "\n"
            for text in ("Count from 1 to 9.", "Count from 2 to 8.")
        )
    )
    flags = "--requests 2 --depths 2 --max-tokens 8 --modes off,lookup --temperature 0.7".split()
    ran = here("bench", "demo", "--prompts", str(file), *flags)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert {row["workload"] for row in result["modes"]} == {"mine", "all"}
    assert result["verdict"]["mode"] == "lookup"
    assert [one["same_text"] for one in result["requests"]] == [True, True]


def test_bench_needs_two_requests(here: Here):
    """One has no interval; said before anything is measured."""
    ran = here("bench", "demo", "--workloads", "chat", "--requests", "1")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "1 request in the batch, a verdict needs at least 2" in ran.stderr


# --- generate ---------------------------------------------------------------------------------


def test_generate_writes_the_reply_alone_to_standard_output(here: Here):
    """With and without the draft the same; figures and reasons go to standard error."""
    flags = "generate --model demo --max-tokens 12 --seed 5".split()
    on = run(*flags, "--speculation", "on", "--depth", "2", COUNT)
    off = here(*flags, "--speculation", "off", COUNT)
    assert (on.returncode, off.returncode) == (0, 0), on.stderr + off.stderr
    assert on.stdout == off.stdout != "\n"
    assert " tok/s · " in on.stderr
    assert " · depth 2 · accept " in on.stderr
    assert off.stderr.splitlines()[-1] == "plain: speculation is off"


def test_auto_says_that_one_reply_measures_nothing(here: Here):
    """And how to find out, or to draft anyway; - reads the prompt from standard input."""
    ran = here("generate", "--max-tokens", "4", "--seed", "1", "-", stdin=COUNT)
    assert ran.returncode == 0, ran.stderr
    first, *_, last = ran.stderr.splitlines()
    assert first.startswith("no model here yet: using the embedded demo pair")
    assert "one reply is too little to measure" in last
    assert "mlx-worker bench" in last


def test_ctrl_c_ends_a_reply_with_one_line_and_exit_130():
    """However far it got. So hot, the demo pair seldom finds an end by itself."""
    command = [sys.executable, "-m", "mlx_worker", "generate", "--model", "demo"]
    hot = ["--temperature", "8", "--top-k", "0", "--top-p", "1", "--seed", "1"]
    process = subprocess.Popen(
        [*command, *hot, "--max-tokens", "1500", "Tell me a long story about a rabbit."],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.read(1)  # the reply has begun
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate()
    assert process.returncode == 130
    assert talk == "mlx-worker: interrupted\n"
