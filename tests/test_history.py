"""What the decision log looks like to a reader."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mlx_worker import history as show, tables
from mlx_worker.decisions import History, Part
from mlx_worker.records import Status


def request(number: int, **changes: Any) -> dict[str, Any]:
    """A plain request while Off, but for the changes; state, text and why are its status's."""
    status = {"state": "off", "speedup": -0.2, "text": "Off, −20%", "why": "it was slower"}
    status |= {key: changes.pop(key) for key in list(changes) if key in (*status, "since_s")}
    line: dict[str, Any] = {
        "kind": "request",
        "number": number,
        "begun_s": 1000.0 + number,
        "mode": "off",
        "pairs": 0,
        "whole": None,
        "stops": 0,
        "rounds": 0,
        "depths": [],
        "drafted": 0,
        "accepted": 0,
        "gain": None,
        "status": status,
        "traffic": {"prompt_tokens": 9, "temperature": 0.0},
    }
    return {**line, **changes}


def history(*requests: dict[str, Any], **options: Any) -> History:
    part = Part({"at_s": 500.0, "n_concluded": 0}, list(requests))
    return History(**{"model": "m", "draft": "d", "parts": [part], **options})


def printed(write: Any, *arguments: Any) -> str:
    out = io.StringIO()
    write(Console(file=out, width=tables.MIN_WIDTH), *arguments)
    return out.getvalue()


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line[2:3] == "-"]


def test_plain_requests_in_a_row_are_one_row():
    """From the second on: the first one's text is new."""
    lines = [request(n) for n in range(1, 30)]
    text = printed(show.print_history, history(*lines))
    assert [line.split()[2] for line in rows(text)] == ["1", "2–29"]


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": 2, "depths": [3], "drafted": 6, "accepted": 1},
        {"pairs": 4},
        {"text": "Off, −21%"},
    ],
)
def test_a_request_that_did_or_changed_something_has_its_own_row(change: dict[str, Any]):
    """It drafted, it tried, or the figure moved."""
    lines = [request(n, **(change if n == 5 else {})) for n in range(1, 10)]
    numbers = [row.split()[2] for row in rows(printed(show.print_history, history(*lines)))]
    assert numbers[:3] == ["1", "2–4", "5"]


def test_a_row_says_what_its_request_did():
    """Kind and context, mode, depths, accepted of drafted, gain, exits, status."""
    line = request(
        7, mode="on", pairs=2, rounds=9, depths=[2, 5], drafted=30, accepted=12, gain=-0.051,
        stops=1, traffic={"prompt_tokens": 20_000, "temperature": 0.4, "has_grammar": False},
    )  # fmt: skip
    (row,) = rows(printed(show.print_history, history(line)))
    assert row.split()[2:] == [
        *("7", "warm", ">16k", "re-timing", "2–5", "12/30", "−5.1%", "1", "Off,", "−20%")
    ]


def test_a_change_of_verdict_has_a_line_with_its_reason():
    """The first state of a load is no change."""
    lines = [
        request(1, state="measuring", text="Measuring", why="comparing"),
        request(2, state="on", text="On, +24%", why="it was faster"),
        request(3, state="on", text="On, +25%", why="it was faster"),
    ]
    text = printed(show.print_history, history(*lines))
    assert [line for line in text.splitlines() if "→" in line] == ["→ On, +24%: it was faster"]
    after = text[text.index("→") :]
    assert len(rows(after)) == 1


def test_each_load_is_named_once():
    """A head in the middle of a course, where a new file began, is none."""
    parts = [
        Part({"at_s": 500.0, "n_concluded": n, "version": "1.2"}, [request(n + 1)]) for n in (0, 7)
    ]
    text = printed(show.print_history, history(parts=parts))
    assert text.count("loaded ") == 1
    assert "version 1.2" in text


def test_long_names_and_big_numbers_stay_within_the_width():
    """Cells fold; nothing is cut off."""
    line = request(
        1_234_567, rounds=1, depths=[1, 8], drafted=12_345, accepted=11_111, gain=12.5,
        traffic={"prompt_tokens": 5000, "temperature": 1.0, "has_grammar": True},
        state="on", text="On, +1234%", why="because " * 30,
    )  # fmt: skip
    one = history(line, line, model="organisation/" + "model-" * 30)
    for text in (printed(show.print_history, one), printed(show.print_status, one)):
        assert max(map(len, text.splitlines())) <= tables.MIN_WIDTH
        assert "…" not in text
    assert "".join(printed(show.print_history, one).split()).count("model-") == 30


def test_a_state_that_never_changed_holds_since_the_load():
    """`since_s` is 0 then."""
    (part,) = history(request(1, state="measuring", since_s=0.0)).parts
    assert show.status_after(part).since_s == 500.0
    (part,) = history(request(1, since_s=800.0)).parts
    assert show.status_after(part).since_s == 800.0


def test_a_figure_that_is_not_known_is_left_out():
    """Before the first pair there is no speed-up, and no depth to go with it."""
    text = printed(show.print_status, history(request(1, state="measuring", speedup=None)))
    assert "Measuring" in text
    assert "speed-up" not in text
    assert "None" not in text


@pytest.mark.parametrize(
    ("loss", "share", "words"),
    [
        (148.2, 0.0178, "148 plain steps, 1.8% of all decoding"),
        (-72.0, -0.3, "none: trials gained 72 plain steps, 30.0% of all decoding"),
        (0.0, 0.0, "none: trials gained 0 plain steps, 0.0% of all decoding"),
    ],
)
def test_a_loss_below_zero_is_a_gain(loss: float, share: float, words: str):
    """Trials of a good draft pay for themselves."""
    assert show.loss_words(Status("on", loss=loss, loss_share=share)) == words


def test_every_pair_is_shown_and_what_is_empty_is_not():
    """As text and as JSON."""
    pairs = [history(request(1)), history(parts=[], model="empty"), history(request(2), model="z")]
    text = printed(show.print_all, pairs)
    assert [line for line in text.splitlines() if line.endswith("with d")] == [
        "m with d",
        "z with d",
    ]
    assert [one["id"] for one in show.as_json(pairs)["models"]] == ["m", "z"]
    assert printed(show.print_all, pairs[1:2]).startswith("nothing measured yet\n")


def test_nothing_in_the_log_is_read_as_markup(tmp_path: Path):
    """A model's folder may have brackets in its name."""
    out = io.StringIO()
    console = tables.console()
    console.file = out
    show.print_status(console, history(request(1), model="[bold]x[/bold] :smile:"))
    assert out.getvalue().startswith("[bold]x[/bold] :smile: with d\n")
