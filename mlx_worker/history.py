"""Show the decision log: the last verdict of each pair, its requests one by one, or both as JSON.

Owns layout and the JSON's keys. Leaves the files to decisions.py and the verdict's text to
records.py. Writes only to the console it is given; any thread.

Times are local, in JSON unix seconds; a figure that isn't known is null there.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from mlx_worker.control.measure import BUCKETS, bucket_of
from mlx_worker.control.pacer import kind_of
from mlx_worker.decisions import History, Line, Part
from mlx_worker.records import Status, Traffic
from mlx_worker.tables import DASH, number, percent, span

NOTHING = (
    "nothing measured yet\n"
    "  Replies measure as they are written, where the model has a draft and\n"
    "  speculation is auto. `mlx-worker bench` compares at once."
)
COLUMNS = (  # name, width, justify; with a space between they fill MIN_WIDTH
    ("when", 11, "left"),
    ("#", 6, "right"),
    ("kind", 10, "left"),
    ("mode", 9, "left"),
    ("depth", 5, "right"),
    ("accepted", 9, "right"),
    ("gain", 7, "right"),
    ("exits", 5, "right"),
    ("status", 10, "left"),
)


# --- words ------------------------------------------------------------------------------------


def local_time(unix_s: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime(form)


def extent(values: Sequence[int]) -> str:
    """3, or 2–5, or a dash."""
    if not values:
        return DASH
    return f"{values[0]}" if values[0] == values[-1] else f"{values[0]}{DASH}{values[-1]}"


def name(history: History) -> str:
    return f"{history.model} with {history.draft}" if history.draft else history.model


def context_word(tokens: int) -> str:
    """<4k, 4–16k, >16k: which costs hold."""
    edges = [f"{edge // 1024}" for edge in BUCKETS]
    names = (f"<{edges[0]}k", f"{edges[0]}{DASH}{edges[1]}k", f">{edges[1]}k")
    return names[bucket_of(tokens)]


def kind_word(line: Line) -> str:
    traffic = Traffic(**line["traffic"])
    return f"{kind_of(traffic)} {context_word(traffic.prompt_tokens)}"


def mode_word(line: Line) -> str:
    """measuring, on, off; where pairs ran in the latter two: re-timing, re-try."""
    mode: str = line["mode"]
    return {"on": "re-timing", "off": "re-try"}.get(mode, mode) if is_timed(line) else mode


def is_timed(line: Line) -> bool:
    """Whether drafts were compared with plain decoding in it, or all of it was half of that."""
    return bool(line["pairs"] or line["whole"])


def print_all(out: Console, histories: Iterable[History], *, has_requests: bool = False) -> None:
    """Every pair's last verdict, or its requests; where nothing is kept, what to do for it."""
    kept = [history for history in histories if history.parts]
    for n, history in enumerate(kept):
        if n:
            out.print()
        (print_history if has_requests else print_status)(out, history)
    if not kept:
        out.print(NOTHING)


# --- the last verdict -------------------------------------------------------------------------


def status_after(part: Part) -> Status:
    """The status that the part's last request left; a state as old as the load is since then."""
    known = {each.name for each in fields(Status)}
    values = part.requests[-1]["status"]
    status = Status(**{key: value for key, value in values.items() if key in known})
    return status if status.since_s else replace(status, since_s=part.head["at_s"])


def print_status(out: Console, history: History) -> None:
    part = history.latest
    if part is None:
        return
    status, last = status_after(part), part.requests[-1]
    out.print(name(history), style="bold")
    out.print(f"  {status.text}", style="bold")
    card = Table.grid(padding=(0, 2, 0, 0))
    card.add_column(no_wrap=True)
    card.add_column()
    for what, said in status_lines(status):
        card.add_row(f"  {what}", said)
    card.add_row("  last request", f"{local_time(last['begun_s'])}, number {last['number']:,}")
    out.print(card)


def status_lines(status: Status) -> Iterator[tuple[str, str]]:
    if status.speedup is not None:
        interval = span(status.low, status.high)
        yield "speed-up", f"{percent(status.speedup)}, 90% interval {interval}"
        yield "depth", DASH if status.depth is None else f"{status.depth}"
        yield "acceptance", number(status.acceptance, 2)
        yield "tokens per round", number(status.tokens_per_round, 2)
        yield "cost per round", f"{number(status.cost, 2)} plain steps"
    yield "measured on", f"{status.requests:,} requests, {status.tokens:,} tokens"
    yield "loss so far", loss_words(status)
    yield "since", local_time(status.since_s)
    yield "why", status.why


def loss_words(status: Status) -> str:
    """What trials have cost; a loss below zero was a gain."""
    share = f"{abs(100 * status.loss_share):.1f}% of all decoding"
    if status.loss <= 0:
        return f"none: trials gained {abs(status.loss):,.0f} plain steps, {share}"
    return f"{status.loss:,.0f} plain steps, {share}"


# --- the requests -----------------------------------------------------------------------------


def print_history(out: Console, history: History) -> None:
    """A row a request; a change of verdict has a line of its own with its reason."""
    out.print(name(history), style="bold")
    out.print(new_table(has_header=True))
    for part in history.parts:
        if not part.head["n_concluded"]:
            loaded = local_time(part.head["at_s"])
            out.print(f"loaded {loaded}, version {part.head.get('version', DASH)}")
        print_part(out, part)


def print_part(out: Console, part: Part) -> None:
    table, state = new_table(), None
    for group in folded(part.requests):
        table.add_row(*cells(group))
        status = group[-1]["status"]
        if state not in (None, status["state"]):
            out.print(table)
            out.print(f"→ {status['text']}: {status['why']}", style="bold")
            table = new_table()
        state = status["state"]
    if table.row_count:
        out.print(table)


def folded(requests: Iterable[Line]) -> Iterator[list[Line]]:
    """Each request alone, but those in a row that drafted nothing and changed nothing together."""
    group: list[Line] = []
    text = None
    for line in requests:
        is_quiet = not line["rounds"] and not is_timed(line) and line["status"]["text"] == text
        text = line["status"]["text"]
        if group and not is_quiet:
            yield group
            group = []
        group.append(line)
        if not is_quiet:
            yield group
            group = []
    if group:
        yield group


def cells(group: Sequence[Line]) -> tuple[str, ...]:
    first, last = group[0], group[-1]
    return (
        local_time(first["begun_s"], "%m-%d %H:%M"),
        extent([first["number"], last["number"]]),
        common(map(kind_word, group)),
        common(map(mode_word, group)),
        extent(first["depths"]),
        f"{first['accepted']}/{first['drafted']}" if first["rounds"] else DASH,
        percent(first["gain"]),
        str(first["stops"]) if first["rounds"] else DASH,
        str(first["status"]["text"]),
    )


def common(values: Iterable[str]) -> str:
    found = set(values)
    return found.pop() if len(found) == 1 else "mixed"


def new_table(has_header: bool = False) -> Table:
    """Fixed widths, so that the pieces between the lines of change stand below each other."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=has_header)
    for title, width, justify in COLUMNS:
        side = "right" if justify == "right" else "left"
        table.add_column(title, width=width, justify=side, overflow="fold")
    return table


# --- for a program ----------------------------------------------------------------------------


def as_json(histories: Iterable[History]) -> dict[str, Any]:
    """`{"models": [{"id", "draft", "speculation": {the status and its text}, …}]}`."""
    return {"models": [model_json(each) for each in histories if each.latest]}


def model_json(history: History) -> dict[str, Any]:
    part = history.latest
    assert part is not None
    status = status_after(part)
    return {
        "id": history.model,
        "draft": history.draft,
        "version": part.head.get("version"),
        "loaded_s": part.head["at_s"],
        "last_request_s": part.requests[-1]["begun_s"],
        "speculation": {"text": status.text, **asdict(status)},
    }


def request_json(history: History) -> Iterator[dict[str, Any]]:
    """Each request as it stands in the log, without its rounds."""
    for part in history.parts:
        for line in part.requests:
            rest = {key: value for key, value in line.items() if key not in ("kind", "segments")}
            yield {"id": history.model, "draft": history.draft, **rest}
