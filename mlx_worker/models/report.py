"""Pulled models, the catalogue and a pull's progress on a terminal.

Owns the layout: tables to standard output, progress to standard error. Leaves what is true to
listing.py and pull.py. Main thread.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from mlx_worker.models.pull import WAITING, Fetched, Finished, Planned, PullEvent
from mlx_worker.tables import DASH

HEAD = ("model", "size", "state", "verdict")
STEP = 10  # percent between two lines of progress where there is no terminal
NOTHING = (
    "no model is here yet\n"
    "  mlx-worker models --catalogue   what there is, and what fits this machine\n"
    "  mlx-worker pull gemma-4-e2b     gets a model and its draft"
)


def gigabytes(n_bytes: float) -> str:
    """3.58 GB, 190 MB, 12 kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            digits = 2 if unit == "GB" and n_bytes < 1e10 else 1 if unit == "GB" else 0
            return f"{n_bytes / size:,.{digits}f} {unit}"
    return f"{n_bytes:.0f} B"


# --- what is here -----------------------------------------------------------------------------


def print_models(
    out: Console, models: Sequence[Mapping[str, Any]], loaded: Iterable[str] | None
) -> None:
    """A row for each. loaded: ids in a running worker's memory; None: no worker answers."""
    if not models:
        out.print(NOTHING)
        return
    rows = [HEAD, *(row(one, set(loaded or ())) for one in models)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    out.print(line(HEAD, widths))
    for one, cells in zip(models, rows[1:], strict=True):
        out.print(line(cells, widths))
        out.print(f"  {draft_line(one)}")
    for one in models:
        if one["state"] == "incomplete":
            out.print(f"{one['id']} is not whole; this goes on: mlx-worker pull {one['id']}")
        elif one["state"] == "ready" and one["missing"]:
            out.print(f"a newer {one['id']} is begun; this goes on: mlx-worker pull {one['id']}")


def row(model: Mapping[str, Any], loaded: set[str]) -> tuple[str, str, str, str]:
    size = gigabytes(model["bytes"])
    return model["id"], size, state(model, loaded), model["speculation"] or DASH


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells under each other; where they don't fit a narrow terminal, it wraps."""
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join(padded).rstrip()


def draft_line(model: Mapping[str, Any]) -> str:
    draft = model["draft"]
    if not draft:
        return f"no draft: {model['draft_note'] or 'none was pulled'}"
    smaller = model["smaller_draft"]
    is_used = bool(smaller and smaller["is_chosen"])
    copy = f"; its {smaller['bits']}-bit copy is {'used' if is_used else 'kept'}" if smaller else ""
    return f"draft: {draft['repo']}, {gigabytes(draft['bytes'])}{copy}"


def state(model: Mapping[str, Any], loaded: set[str]) -> str:
    share = f"{100 * model['present_bytes'] // max(1, model['bytes'])} %"
    match model["state"]:
        case "downloading":
            return f"downloading, {share}"
        case "incomplete":
            return f"incomplete, {share}"
        case "updating":
            return f"ready; a newer one is downloading, {share}"
    return "in use" if model["id"] in loaded else "ready"


def print_catalogue(out: Console, rows: Iterable[Mapping[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("model", no_wrap=True)
    table.add_column("download", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("this machine", no_wrap=True)
    for one in rows:
        size = one["bytes"] + one["draft_bytes"]
        fit = "pulled" if one["is_pulled"] else "fits" if one["fits"] else "too large"
        table.add_row(one["id"], gigabytes(size), gigabytes(one["need_bytes"]), fit)
    out.print(table)
    out.print("sizes are about right, draft included; a pull asks the hub first")


# --- a pull -----------------------------------------------------------------------------------


def follow(events: Iterable[PullEvent], talk: Any) -> Finished:
    """Show a pull as it goes; returns how it ended. talk: hears a line."""
    finished: Finished | None = None
    is_news = is_waiting = False
    with meter(talk) as advance:
        for event in events:
            if isinstance(event, Planned):
                for line in plan_lines(event):
                    talk(line)
            elif isinstance(event, Fetched) and event.file == WAITING:
                if not is_waiting:
                    talk("another pull of it is under way; waiting for its end")
                is_waiting = True
            elif isinstance(event, Fetched) and event.n_bytes:
                is_news = is_news or event.n_present < event.n_bytes
                if is_news or sys.stderr.isatty():
                    advance(event)
            elif isinstance(event, Finished):
                finished = event
    assert finished, "a pull ends with Finished, or raises"
    return finished


def plan_lines(plan: Planned) -> Iterator[str]:
    pulled = plan.pulled
    model = pulled.model
    yield f"{pulled.id}: {model.repo} at {model.commit[:12]}, {gigabytes(model.n_bytes)}"
    if pulled.draft:
        draft = pulled.draft
        yield f"draft: {draft.repo} at {draft.commit[:12]}, {gigabytes(draft.n_bytes)}"
    else:
        yield f"no draft: {pulled.draft_note}"
    left = plan.n_bytes - plan.n_present
    if not left:
        yield f"all {gigabytes(plan.n_bytes)} are here; checking them"
        return
    here = f", {gigabytes(plan.n_present)} are here" if plan.n_present else ""
    yield f"to come: {gigabytes(left)}{here}; free on the disk: {gigabytes(plan.free_bytes)}"


def result_lines(finished: Finished) -> Iterator[str]:
    pulled = finished.pulled
    n_files = sum(len(one.files) for one in pulled.snapshots)
    what = "is here" if finished.is_new else "was here already"
    yield f"{pulled.id} {what}: {gigabytes(pulled.n_bytes)} in {n_files} files, checked"
    if finished.is_unchecked:
        yield f"whether there is a newer revision is not known: {finished.is_unchecked}"
    elif not pulled.draft:
        yield f"it works without a draft: {pulled.draft_note}"


@contextmanager
def meter(talk: Any) -> Iterator[Any]:
    """One bar for all files on a terminal; elsewhere a line for every STEP percent."""
    if not sys.stderr.isatty():
        yield _lines(talk)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def advance(event: Fetched) -> None:
            progress.update(
                task, description=event.file, completed=event.n_present, total=event.n_bytes
            )

        yield advance


def _lines(talk: Any) -> Any:
    said = -1

    def advance(event: Fetched) -> None:
        nonlocal said
        step = 100 * event.n_present // event.n_bytes // STEP
        if step > said:
            said = step
            of = f"{gigabytes(event.n_present)} of {gigabytes(event.n_bytes)}"
            talk(f"{100 * event.n_present // event.n_bytes:3d} % {of} {event.file}")

    return advance
