"""The menu in the menu bar, from what is seen of the worker and of its service.

Owns which lines there are, their words, and which of them can be clicked. Leaves drawing to
menubar_app.py, looking to menubar_watch.py, and doing what is clicked to actions.py. Pure; any
thread.

Names come from model folders and from gateways: they are cut, and can't pass for a line of ours.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any, Literal

from mlx_worker.errors import parted
from mlx_worker.local import Condition, Seen
from mlx_worker.service.manager import ServiceState

Verb = Literal[
    "install", "start", "stop", "restart", "speculation", "console", "copy", "logs", "quit"
]
OF_SERVICE: frozenset[Verb] = frozenset(("install", "start", "stop", "restart"))
NAME_CHARS, LINE_CHARS, MOST_LINES = 40, 80, 4
MOST_MODELS = 8
NOW_S = 60.0  # a reply that ended so long ago still says how fast it is now
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
IDLE, DRAFTING, DOWN, WAITS, TROUBLE = (  # SF Symbols, all of them there since macOS 11
    "bolt", "bolt.fill", "bolt.slash", "hourglass", "exclamationmark.triangle",
)  # fmt: skip

HEADS: Mapping[Condition, tuple[str, str]] = {
    "never": ("Not running", DOWN),
    "starting": ("Starting: it loads its model", WAITS),
    "ready": ("Ready", IDLE),
    "failing": ("Can't answer requests", TROUBLE),
    "draining": ("Stopping: it finishes its requests", WAITS),
    "silent": ("Its process is there, but doesn't answer", TROUBLE),
    "stopped": ("Not running", DOWN),
    "refused": ("Not running: its last start failed", TROUBLE),
    "crashed": ("Not running: it ended by a failure", TROUBLE),
}
NO_WORD = "it ended without a word: killed, its disk full, or the machine went down"
# Of these, the sentence of the measurement isn't why.
BECAUSE = {
    "paused": "drafts pause while Run requests together is on",
    "settings_off": "",
    "platform_off": "",
    "needs_update": "",
}
HOT = ("serious", "critical")
REFUSED = ("key rejected", "update needed", "replaced", "redirected")  # by the gateway, for good
DOING: Mapping[Verb, str] = {
    "install": "Installing the service…",
    "start": "Starting…",
    "stop": "Stopping…",
    "restart": "Restarting…",
    "speculation": "Changing the setting…",
    "console": "Opening the console…",
    "copy": "Copying…",
    "logs": "Opening the logs…",
}


@dataclass(frozen=True)
class Action:
    """What a click does. value: an address, a folder, or the setting that is wanted."""

    verb: Verb
    value: str = ""


@dataclass(frozen=True)
class Item:
    """One line.

    key     names it as long as it means the same, whatever its words
    action  None: it only tells something
    level   0, or 1 for what tells more of the line above
    whole   its words uncut; empty where nothing was cut
    """

    key: str
    text: str
    action: Action | None = None
    is_enabled: bool = False
    is_checked: bool = False
    level: int = 0
    whole: str = ""


@dataclass(frozen=True)
class Menu:
    """title: what the icon stands for, in words; items: None separates."""

    title: str
    symbol: str
    items: tuple[Item | None, ...]

    def action(self, key: str) -> Action | None:
        """Of the line with this key, if it can be clicked."""
        for item in self.items:
            if item is not None and item.key == key and item.is_enabled:
                return item.action
        return None


def first_menu(problem: str = "") -> Menu:
    """Until the worker was looked at."""
    looking = [Item("state", "Looking at the worker…")]
    symbol = TROUBLE if problem else IDLE
    return _menu("Looking", symbol, [list(_failures(None, problem)), looking, [_quit()]])


def menu_of(
    seen: Seen, service: ServiceState, *, doing: Verb | None = None, problem: str = ""
) -> Menu:
    """doing: what was clicked and isn't done yet; problem: what the last click ended with."""
    status = seen.status or {}
    head, symbol = HEADS[seen.condition]
    if symbol == IDLE:
        symbol = _symbol(status)
    sections = [
        list(_failures(doing, problem)),
        [_line("state", head), *_why(seen, service)],
        list(_models(seen)),
        list(_work(status)),
        [*_gateway(status.get("link")), *_power(status.get("power") or {})],
        list(_service(seen, service, doing)),
        list(_commands(seen, doing)),
        [_quit()],
    ]
    return _menu(head, TROUBLE if problem else symbol, sections)


def _symbol(status: Mapping[str, Any]) -> str:
    """Of a worker that is ready: something to mend, drafts in use, or neither."""
    models = status.get("models") or ()
    is_refused = (status.get("link") or {}).get("state") in REFUSED
    if is_refused or any(model.get("load_problem") for model in models):
        return TROUBLE
    return DRAFTING if any(map(_is_on, models)) else IDLE


def _menu(head: str, symbol: str, sections: Iterable[Sequence[Item]]) -> Menu:
    items: list[Item | None] = []
    for section in sections:
        if section and items:
            items.append(None)
        items += section
    return Menu(f"mlx-worker: {head[0].lower()}{head[1:]}", symbol, tuple(items))


# --- what is so -------------------------------------------------------------------------------


def _failures(doing: Verb | None, problem: str) -> Iterator[Item]:
    if doing is not None:
        yield _line("doing", DOING.get(doing, "…"))
    if problem:
        yield from _error("problem", problem, level=0)


def _why(seen: Seen, service: ServiceState) -> Iterator[Item]:
    if seen.error:
        yield from _error("error", seen.error)
    elif seen.condition == "crashed":
        yield _line("error", NO_WORD, level=1)
    if _is_looping(service) and not seen.is_running:
        yield _line("loop", "it is started again every few seconds", level=1)


def _error(key: str, error: str, level: int = 1) -> Iterator[Item]:
    """What happened, and in lines of its own what to do about it."""
    what, hint = parted(error)
    yield from _lines(key, what, level)
    if hint:
        yield from _lines(f"{key} hint", f"Next: {hint}")


def _is_on(model: Mapping[str, Any]) -> bool:
    return bool(model.get("is_loaded")) and (model.get("measured") or {}).get("state") == "on"


def _models(seen: Seen) -> Iterator[Item]:
    """Those in memory first, else in the order they are served in."""
    if seen.status is None:
        known = [{"id": id, "speculation": text} for id, text in seen.models]
        models = known if seen.is_running else []
        is_offered = True
    else:
        models = sorted(seen.status.get("models") or (), key=lambda each: not each.get("is_loaded"))
        is_offered = _platform(seen.status) != "unavailable"
    for n, model in enumerate(models[:MOST_MODELS]):
        yield from _model(f"model {n}", model, is_offered=is_offered)
    if (n_more := len(models) - MOST_MODELS) > 0:
        yield _line("more models", f"{n_more} more: the console shows them")


def _model(key: str, model: Mapping[str, Any], *, is_offered: bool) -> Iterator[Item]:
    name = clean(str(model.get("id")))
    shown = middle(name, NAME_CHARS)
    is_there = model.get("is_loaded", True)
    problem = model.get("load_problem")
    text = shown if is_there or problem else f"{shown} (loads when it is asked for)"
    yield Item(key, text, whole=name if shown != name else "")
    if problem:
        yield from _error(f"{key} problem", f"couldn't be loaded: {problem}")
    if not is_offered:
        return
    if speculation := model.get("speculation"):
        yield _line(f"{key} speculation", f"Speculative decoding: {speculation}", level=1)
        yield from _measured(key, model.get("measured") or {})
    elif model.get("draft_problem"):
        yield from _lines(f"{key} draft", f"its draft isn't used: {model['draft_problem']}")


def _measured(key: str, figures: Mapping[str, Any]) -> Iterator[Item]:
    """The figures behind a verdict, and why it is so."""
    state = figures.get("state")
    if state in ("on", "off") and (shown := ", ".join(_figures(figures))):
        yield _line(f"{key} figures", shown, level=1)
    if why := BECAUSE.get(str(state), figures.get("why")):
        yield from _lines(f"{key} why", str(why))


def _figures(figures: Mapping[str, Any]) -> Iterator[str]:
    if figures.get("depth"):
        yield f"depth {figures['depth']}"
    if figures.get("acceptance") is not None:
        yield f"{100 * figures['acceptance']:.0f} % of drafted tokens accepted"


def _work(status: Mapping[str, Any]) -> Iterator[Item]:
    """What it has to do, and how fast it was a moment ago; nothing where it was idle."""
    queue = status.get("queue") or {}
    n_running, n_waiting = queue.get("running") or 0, queue.get("waiting") or 0
    if n_running or n_waiting:
        waits = f", {n_waiting} waiting" if n_waiting else ""
        yield _line("queue", f"{n_running} request{'s' * (n_running != 1)} running{waits}")
    speed = speed_now(status.get("recent") or ())
    if speed is not None:
        yield _line("speed", f"{speed:.0f} tokens per second in the last reply")


def speed_now(recent: Sequence[Mapping[str, Any]]) -> float | None:
    """Of the last reply, if that is not long ago; of a worker that doesn't say when: None."""
    for reply in reversed(recent):
        if reply.get("ago_s") is None or reply["ago_s"] > NOW_S:
            return None
        if reply.get("tokens_per_s") is not None:
            return float(reply["tokens_per_s"])
    return None


def _gateway(link: Mapping[str, Any] | None) -> Iterator[Item]:
    if not link:
        return
    state, why = str(link.get("state")), link.get("why")
    if state == "connected":
        name = middle(clean(str(link.get("name") or "")), NAME_CHARS)
        yield _line("gateway", f"Gateway: connected as {name}" if name else "Gateway: connected")
        return
    if state == "waiting":
        state = f"away for {duration(link.get('since_s') or 0.0)}"
    yield _line("gateway", f"Gateway: {state}")
    if why:
        yield from _lines("gateway why", str(why))


def _power(power: Mapping[str, Any]) -> Iterator[Item]:
    """Only what makes it slower."""
    if power.get("thermal") in HOT:
        yield _line("heat", f"The machine is hot ({power['thermal']}): it runs slower")
    if power.get("is_low_power"):
        yield _line("low power", "Low Power Mode: it runs slower")


# --- what can be done -------------------------------------------------------------------------


def _service(seen: Seen, service: ServiceState, doing: Verb | None) -> Iterator[Item]:
    """The service is the one owner of the worker: whatever else runs it isn't touched."""
    is_free = service.problem is None and doing not in OF_SERVICE
    is_foreign = seen.is_running and not service.is_running
    if service.is_installed:
        is_there = service.is_running or _is_looping(service)
        can_start = is_free and not service.is_running and not is_foreign
        yield Item("start", "Start", Action("start"), can_start)
        yield Item("stop", "Stop", Action("stop"), is_free and is_there)
        yield Item("restart", "Restart", Action("restart"), is_free and service.is_running)
    elif not is_foreign:
        text = "Install the service: starts now and at login"
        yield Item("install", text, Action("install"), is_free)
    if service.problem is not None:
        yield from _error("service problem", f"Service: {service.problem}", level=0)
    elif is_foreign:
        where = "It isn't run by the service: it ends where it was started"
        yield _line("foreign", where, level=int(service.is_installed))


def _is_looping(service: ServiceState) -> bool:
    """It crashed, and the supervisor starts it again."""
    return service.is_loaded and not service.is_running and bool(service.last_exit)


def _commands(seen: Seen, doing: Verb | None) -> Iterator[Item]:
    address = seen.address if seen.is_running and seen.address else ""
    api = f"{address.rstrip('/')}/v1" if address else ""
    yield Item("console", "Open console", Action("console", address), bool(address))
    copy = _line("copy", f"Copy API address {api}".rstrip())
    yield replace(copy, action=Action("copy", api), is_enabled=bool(api))
    yield from _speculation(seen, doing)
    problem = (seen.status or {}).get("settings_problem")
    if problem:
        yield from _error("settings problem", f"Settings: {problem}")
    yield Item("logs", "Show logs", Action("logs", str(seen.log)), True)


def _speculation(seen: Seen, doing: Verb | None) -> Iterator[Item]:
    """The worker's own switch. Where the platform's is off, ours changes nothing."""
    platform = _platform(seen.status or {})
    if platform == "unavailable":
        return
    settings = (seen.status or {}).get("settings") or {}
    is_off = settings.get("speculative_decoding") == "off"
    is_known = "speculative_decoding" in settings and seen.address is not None
    action = Action("speculation", "auto" if is_off else "off")
    can_switch = is_known and platform != "off" and doing is None
    yield Item("speculation", "Pause speculation", action, can_switch, is_checked=is_off)
    if platform == "off":
        who = ((seen.status or {}).get("platform") or {}).get("display_name")
        name = middle(clean(str(who)), NAME_CHARS)
        yield _line("platform", f"it is switched off by {name}", level=1)


def _platform(status: Mapping[str, Any]) -> str:
    return str((status.get("platform") or {}).get("speculative_decoding", "auto"))


def _quit() -> Item:
    return Item("quit", "Quit this menu (the worker goes on)", Action("quit"), True)


# --- words ------------------------------------------------------------------------------------


def _lines(key: str, text: str, level: int = 1) -> Iterator[Item]:
    """Some lines of it, where one isn't enough."""
    whole = clean(text)
    *kept, last = wrap(whole, LINE_CHARS, max_lines=MOST_LINES, placeholder="…") or [""]
    is_cut = last.endswith("…") and not whole.endswith("…")
    for n, line in enumerate((*kept, last)):
        yield Item(f"{key} {n}" if n else key, line, level=level, whole=whole if is_cut else "")


def _line(key: str, text: str, level: int = 0) -> Item:
    whole = clean(text)
    shown = whole if len(whole) <= LINE_CHARS else f"{whole[: LINE_CHARS - 1].rstrip()}…"
    return Item(key, shown, level=level, whole=whole if shown != whole else "")


def clean(text: str) -> str:
    """One line of printable characters: neither escape codes nor marks that turn text round."""
    shown = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(shown.split())


def middle(text: str, most: int) -> str:
    """Cut in its middle, since the ends of model names tell them apart."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[-end:]}"


def duration(seconds: float) -> str:
    """41 s, 12 min, 3 h, 2 d."""
    for unit_s, unit in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


# --- printed ----------------------------------------------------------------------------------


def printed(menu: Menu) -> str:
    """The menu as text: › can be clicked, (disabled) can't be now, ✓ is on."""
    lines = [f"{menu.title} [{menu.symbol}]"]
    lines += ["  ───" if item is None else _printed(item) for item in menu.items]
    return "\n".join(lines) + "\n"


def _printed(item: Item) -> str:
    mark = "›" if item.is_enabled else " "
    check = "✓ " if item.is_checked else ""
    off = " (disabled)" if item.action is not None and not item.is_enabled else ""
    return f"{mark} {'  ' * item.level}{check}{item.text}{off}"
