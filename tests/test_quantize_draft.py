"""`mlx-worker quantize-draft` as a user meets it, on the demo pair as a model that was pulled."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_worker import cli
from mlx_worker.bench import drafts
from mlx_worker.bench.facts import machine
from mlx_worker.bench.run import OFF, Arm, Served
from mlx_worker.models.locate import locate
from mlx_worker.models.store import Store
from mlx_worker.records import Source
from tests.bench.replies import reply, served
from tests.drafts import REPO, pull_demo

Command = Callable[..., tuple[int, str, str]]
QUICK = "--workloads count,chat --requests 1 --max-tokens 12".split()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run it in this process: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx-worker", *arguments])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def scripted(published_ms: float, smaller_ms: float) -> drafts.Comparison:
    """What would have been measured."""
    arms = {OFF: 10.0, Arm(drafts.PUBLISHED, 1): published_ms, Arm(drafts.SMALLER, 1): smaller_ms}
    replies = [
        Served(served(i, 10.0, {}).request, {arm: reply(ms + i / 100) for arm, ms in arms.items()})
        for i in range(4)
    ]
    comparison = drafts.compare(machine(), replies)
    assert comparison is not None
    return comparison


def used_draft() -> Path:
    source = locate(REPO)
    assert isinstance(source, Source)
    assert source.draft is not None
    return source.draft.folder


def test_a_real_run_ends_with_the_choice_that_is_kept(command: Command):
    """Whatever this machine finds: the line, the record and what is served agree."""
    pull_demo(Store.default())
    published = used_draft()
    code, out, err = command("quantize-draft", REPO, *QUICK)
    assert code == 0
    assert "14 layers at 4 bits" in err
    assert "Same text in every arm: 2 of 2 requests." in out
    last = out.splitlines()[-1]
    is_chosen = last.startswith("chosen: the 4-bit copy")
    assert is_chosen or last.startswith("kept, not chosen: the 4-bit copy")
    assert (used_draft() != published) is is_chosen


def test_measuring_again_may_change_the_choice_either_way(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    """Scripted timings; the copy itself is made once."""
    pull_demo(Store.default())
    published = used_draft()
    copy = Store.default().drafts / "acme--demo-it-assistant-4bit"
    outcomes = [(8.0, 6.0, copy), (6.0, 8.0, published), (8.0, 6.0, copy)]
    made: list[str] = []
    for published_ms, smaller_ms, used in outcomes:
        found = scripted(published_ms, smaller_ms)
        monkeypatch.setattr(drafts, "measure", lambda _, found=found: found)
        code, out, err = command("quantize-draft", REPO, *QUICK)
        assert (code, used_draft()) == (0, used)
        assert out.splitlines()[-1].startswith("chosen" if used == copy else "kept, not chosen")
        made += [line for line in err.splitlines() if "layers at 4 bits" in line]
    assert len(made) == 1


def test_json_is_one_object_on_standard_output(command: Command, monkeypatch: pytest.MonkeyPatch):
    """With everything that the table says."""
    pull_demo(Store.default())
    monkeypatch.setattr(drafts, "measure", lambda _: scripted(8.0, 6.0))
    _, out, _ = command("quantize-draft", REPO, "--json", *QUICK)
    found: dict[str, Any] = json.loads(out)
    assert (found["model"], found["draft"]) == (REPO, f"{REPO}-assistant")
    assert (found["is_chosen"], found["copy"]["bits"]) == (True, 4)
    assert found["bench"]["gain"]["low"] > 0
    assert set(found["bench"]["drafts"]) == {"assistant", "smaller"}
    assert found["bench"]["same_text"] == found["bench"]["requests"] == 4


def test_without_a_bench_nothing_is_chosen(command: Command):
    """The copy is kept, for a later measurement."""
    pull_demo(Store.default())
    published = used_draft()
    code, out, _ = command("quantize-draft", REPO, "--no-bench", "--bits", "8")
    folder = Store.default().drafts / "acme--demo-it-assistant-8bit"
    assert (code, out) == (0, f"kept, not measured: {folder}\n")
    assert (used_draft(), (folder / "config.json").exists()) == (published, True)


def test_a_model_with_its_copy_is_removed_whole(command: Command):
    """`mlx-worker remove` leaves nothing of it."""
    store = Store.default()
    pull_demo(store)
    command("quantize-draft", REPO, "--no-bench")
    assert list(store.drafts.iterdir())
    assert command("remove", REPO)[0] == 0
    assert list(store.drafts.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody/x"], "'nobody/x' was not pulled. hint: mlx-worker pull nobody/x"),
        ([REPO, "--bits", "7"], "--bits: 7, must be one of 2, 3, 4, 5, 6, 8"),
        ([REPO, "--group-size", "48"], "--group-size: 48, must be one of 32, 64, 128"),
        ([REPO, "--workloads", "poems"], "poems"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    command: Command, arguments: list[str], message: str
):
    """One line, exit code 2."""
    pull_demo(Store.default())
    code, out, err = command("quantize-draft", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert not Store.default().drafts.exists()
