"""The menu, from what is seen of a worker: its lines, and which of them can be clicked."""

from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

from mlx_worker.local import Condition, Seen
from mlx_worker.records import MINUS, Settings, State, Status, effective_status, status_text
from mlx_worker.service.manager import ServiceState
from mlx_worker.service.menubar import (
    LINE_CHARS,
    MOST_MODELS,
    NAME_CHARS,
    Action,
    Item,
    Menu,
    clean,
    duration,
    first_menu,
    menu_of,
    middle,
    printed,
)
from scripts.menus import ENDED, LOGS, MEASURING, OFF, ON, RUNS, link, ready, text

GOLDEN = Path(__file__).parent.parent / "vectors" / "menus.txt"
ABSENT = ServiceState("worker", Path("/unit"), is_installed=False)
SETTINGS = {word: Settings(speculative_decoding=word) for word in ("auto", "off")}
DOWN: tuple[Condition, ...] = ("never", "stopped", "refused", "crashed")


def down(condition: Condition = "stopped", **fields: Any) -> Seen:
    return Seen(condition, LOGS, address="http://127.0.0.1:8321/", **fields)


def rows(menu: Menu) -> list[Item]:
    return [item for item in menu.items if item is not None]


def row(menu: Menu, key: str) -> Item:
    return next(item for item in rows(menu) if item.key == key)


def has(menu: Menu, key: str) -> bool:
    return any(item.key == key for item in rows(menu))


def texts(menu: Menu, key: str) -> list[str]:
    """Of the lines whose key begins so."""
    return [item.text for item in rows(menu) if item.key.startswith(key)]


def enabled(menu: Menu) -> set[str]:
    return {item.key for item in rows(menu) if item.is_enabled}


def with_model(**model: Any) -> Seen:
    seen = ready()
    models = [{"id": "m", "is_loaded": True, "speculation": None, "measured": None, **model}]
    return replace(seen, status={**(seen.status or {}), "models": models})


# --- the whole --------------------------------------------------------------------------------


def test_eight_menus_are_as_they_were():
    """Not running, measuring, on, off, off by settings, paused, key rejected, out of memory."""
    assert text() == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("condition", get_args(Condition))
@pytest.mark.parametrize("service", [RUNS, ENDED, ABSENT], ids=["runs", "ended", "absent"])
def test_every_condition_has_a_menu(condition: Condition, service: ServiceState):
    """With a head, logs and a way out, whatever the service is; each key is there once."""
    menu = menu_of(down(condition), service)
    keys = [item.key for item in rows(menu)]
    assert {"state", "logs", "quit"} <= set(keys)
    assert len(keys) == len(set(keys))
    assert menu.items[0] is not None
    assert all(a or b for a, b in pairwise(menu.items))


@pytest.mark.parametrize("state", get_args(State))
def test_every_text_of_the_contract_is_shown_exactly(state: State):
    """And no line where there is none."""
    shown = Status(state, speedup=0.24 if state == "on" else -0.18)
    expected = status_text(shown)
    menu = menu_of(with_model(speculation=expected, measured=asdict(shown)), RUNS)
    wanted = [] if expected is None else [f"Speculative decoding: {expected}"]
    assert texts(menu, "model 0 speculation") == wanted


def test_the_icon_tells_what_is_so():
    """Drafting, plain, loading, down, and something to look at."""
    symbols = [
        menu_of(seen, RUNS).symbol
        for seen in (ready(), ready(OFF), down("starting"), down(), down("crashed"))
    ]
    assert symbols == ["bolt.fill", "bolt", "hourglass", "bolt.slash", "exclamationmark.triangle"]


def test_until_the_first_look_only_quit_is_offered():
    """Nothing is known yet."""
    assert enabled(first_menu()) == {"quit"}


# --- why it doesn't run -----------------------------------------------------------------------


def test_an_error_and_its_next_step_are_lines_of_their_own():
    """As state.json has them."""
    menu = menu_of(down("refused", error="port 8321 is taken by nginx. hint: end it"), ENDED)
    assert texts(menu, "error") == ["port 8321 is taken by nginx", "Next: end it"]


def test_a_model_that_did_not_fit_is_told_while_the_worker_goes_on():
    """A load on demand that failed for memory."""
    problem = "big: its weights take 54,000 MB, this worker may use 12,000 MB. hint: a smaller one"
    menu = menu_of(with_model(id="big", is_loaded=False, load_problem=problem), RUNS)
    assert texts(menu, "model 0 problem") == [
        "couldn't be loaded: big: its weights take 54,000 MB, this worker may use 12,000",
        "MB",
        "Next: a smaller one",
    ]
    assert menu.symbol == "exclamationmark.triangle"


def test_an_end_without_a_word_is_told():
    """As by a kill for memory."""
    assert texts(menu_of(down("crashed"), ENDED), "error") == [
        "it ended without a word: killed, its disk full, or the machine went down"
    ]


def test_a_loop_of_crashes_is_told_and_can_be_stopped():
    """The supervisor starts it again and again."""
    menu = menu_of(down("crashed"), replace(RUNS, pid=None, last_exit=1))
    assert has(menu, "loop")
    assert {"start", "stop"} <= enabled(menu)


def test_a_long_error_takes_several_lines_and_is_cut_then():
    """A menu isn't a log; the tip has the rest."""
    menu = menu_of(down("refused", error="word " * 200), ENDED)
    shown = [item for item in rows(menu) if item.key.startswith("error")]
    assert len(shown) == 4
    assert all(len(item.text) <= LINE_CHARS for item in shown)
    assert shown[-1].text.endswith("…")
    assert shown[-1].whole.count("word") == 200


# --- models -----------------------------------------------------------------------------------


def test_figures_and_reason_stand_below_a_verdict():
    """Why, depth, acceptance."""
    menu = menu_of(ready(), RUNS)
    assert texts(menu, "model 0") == [
        "gemma-4-12b-it-4bit",
        "Speculative decoding: On, +24%",
        "depth 4, 71 % of drafted tokens accepted",
        "12 requests were 24 % faster with drafts",
    ]


@pytest.mark.parametrize("switch", ["is_off_by_settings", "is_off_by_platform", "is_paused"])
def test_where_a_switch_decides_the_measurement_is_no_reason(switch: str):
    """What was measured before stays in the record."""
    shown = effective_status(ON, has_draft=True, **{switch: True})
    menu = menu_of(with_model(speculation=status_text(shown), measured=asdict(shown)), RUNS)
    assert not has(menu, "model 0 figures")
    assert "12 requests" not in printed(menu)


def test_models_in_memory_come_first():
    """The others say that they are loaded when they are asked for."""
    models = [{"id": "a", "is_loaded": False}, {"id": "b", "is_loaded": True}]
    seen = replace(ready(), status={"models": models})
    assert texts(menu_of(seen, RUNS), "model") == ["b", "a (loads when it is asked for)"]


def test_many_models_are_cut_to_some():
    """A menu must fit a screen."""
    models = [{"id": str(n), "is_loaded": True} for n in range(MOST_MODELS + 3)]
    menu = menu_of(replace(ready(), status={"models": models}), RUNS)
    assert texts(menu, "more models") == ["3 more: the console shows them"]


def test_a_draft_that_does_not_fit_is_told():
    """The model has no line of the contract then."""
    menu = menu_of(with_model(draft_problem="vocabularies differ"), RUNS)
    assert texts(menu, "model 0 draft") == ["its draft isn't used: vocabularies differ"]


def test_an_organisation_without_the_feature_sees_nothing_of_it():
    """Neither a line nor a switch."""
    seen = with_model(draft_problem="vocabularies differ")
    status = {**(seen.status or {}), "platform": {"speculative_decoding": "unavailable"}}
    menu = menu_of(replace(seen, status=status), RUNS)
    assert texts(menu, "model 0") == ["m"]
    assert not has(menu, "speculation")


def test_a_worker_that_wants_a_key_shows_its_models_as_last_seen():
    """Its address is known, what it does isn't."""
    seen = down("ready", error="it wants a key. hint: set it", models=(("m", "On, +24%"),))
    menu = menu_of(seen, RUNS)
    assert texts(menu, "model 0") == ["m", "Speculative decoding: On, +24%"]
    assert "console" in enabled(menu)
    assert "speculation" not in enabled(menu)


# --- work, gateway, power ---------------------------------------------------------------------


def test_a_speed_is_shown_only_while_it_is_of_now():
    """A minute after the last reply nothing is claimed."""
    assert texts(menu_of(ready(), RUNS), "speed") == ["58 tokens per second in the last reply"]
    old = [{"tokens_per_s": 58.0, "ago_s": 61.0}]
    assert not has(menu_of(ready(recent=old), RUNS), "speed")


def test_a_reply_without_a_speed_leaves_the_one_before_it():
    """It had one token; nothing measured at all shows nothing."""
    recent = [{"tokens_per_s": 20.0, "ago_s": 9.0}, {"tokens_per_s": None, "ago_s": 1.0}]
    assert texts(menu_of(ready(recent=recent), RUNS), "speed") == [
        "20 tokens per second in the last reply"
    ]
    assert not has(menu_of(ready(recent=[]), RUNS), "speed")


def test_an_older_worker_that_does_not_say_when_shows_no_speed():
    """It may be of yesterday."""
    assert not has(menu_of(ready(recent=[{"tokens_per_s": 20.0}]), RUNS), "speed")


def test_the_queue_is_shown_while_there_is_one():
    """One running, two waiting; an idle worker has no line."""
    busy = ready(queue={"running": 1, "waiting": 2})
    assert texts(menu_of(busy, RUNS), "queue") == ["1 request running, 2 waiting"]
    assert not has(menu_of(ready(), RUNS), "queue")


@pytest.mark.parametrize(
    ("shown", "lines", "symbol"),
    [
        (None, [], "bolt"),
        (link("connected"), ["Gateway: connected as ada's Mac"], "bolt"),
        (link("connecting"), ["Gateway: connecting"], "bolt"),
        (link("waiting", "no route"), ["Gateway: away for 1 min", "no route"], "bolt"),
        (
            link("key rejected", "not known"),
            ["Gateway: key rejected", "not known"],
            "exclamationmark.triangle",
        ),
    ],
)
def test_the_gateway_is_shown_where_there_is_one(shown: Any, lines: list[str], symbol: str):
    """A refusal, which no waiting mends, changes the icon."""
    menu = menu_of(ready(MEASURING, link=shown), RUNS)
    assert (texts(menu, "gateway"), menu.symbol) == (lines, symbol)


def test_only_power_that_makes_it_slower_is_shown():
    """Heat from serious on, Low Power Mode; not that it runs on battery."""
    calm = {"is_on_battery": True, "thermal": "fair", "is_low_power": False}
    hot = {"is_on_battery": None, "thermal": "serious", "is_low_power": True}
    assert not {"heat", "low power"} & {item.key for item in rows(menu_of(ready(power=calm), RUNS))}
    shown = printed(menu_of(ready(power=hot), RUNS))
    assert "The machine is hot (serious): it runs slower" in shown
    assert "Low Power Mode: it runs slower" in shown


# --- what can be clicked ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "service", "verbs"),
    [
        (down(), ENDED, {"start"}),
        (down("refused"), replace(RUNS, pid=None, last_exit=0), {"start"}),
        (ready(), RUNS, {"stop", "restart"}),
        (down("starting"), RUNS, {"stop", "restart"}),
        (down("silent"), RUNS, {"stop", "restart"}),
        (down("crashed"), replace(RUNS, pid=None, last_exit=-9), {"start", "stop"}),
        (ready(), ENDED, set()),
        (down(), ABSENT, {"install"}),
        (down("never"), ABSENT, {"install"}),
        (ready(), ABSENT, set()),
        (down(), replace(ENDED, problem="nobody is logged in"), set()),
        (down(), replace(ABSENT, problem="no systemd"), set()),
    ],
)
def test_the_verbs_are_those_that_fit_the_service(
    seen: Seen, service: ServiceState, verbs: set[str]
):
    """The menu drives the service alone: a worker of a terminal is left to who started it."""
    can = enabled(menu_of(seen, service))
    assert can & {"install", "start", "stop", "restart"} == verbs


def test_a_worker_of_a_terminal_is_said_to_be_one():
    """Why nothing can be started or stopped here."""
    shown = printed(menu_of(ready(), ENDED))
    assert "It isn't run by the service: it ends where it was started" in shown


def test_what_is_being_done_is_shown_and_not_offered_again():
    """Open console and logs are still there."""
    menu = menu_of(ready(), RUNS, doing="stop")
    assert texts(menu, "doing") == ["Stopping…"]
    assert enabled(menu) == {"console", "copy", "logs", "quit"}


def test_a_failed_click_comes_first():
    """With its next step, and an icon that says that something is to be seen."""
    menu = menu_of(ready(), RUNS, problem="stop: it didn't end. hint: try again")
    assert [item.text for item in rows(menu)[:2]] == ["stop: it didn't end", "Next: try again"]
    assert menu.symbol == "exclamationmark.triangle"


@pytest.mark.parametrize(("now", "wanted"), [("auto", "off"), ("off", "auto")])
def test_pausing_is_a_switch(now: str, wanted: str):
    """A check mark shows that it is off, a click turns it."""
    menu = menu_of(ready(settings=SETTINGS[now]), RUNS)
    item = row(menu, "speculation")
    assert (item.is_checked, item.action) == (now == "off", Action("speculation", wanted))


def test_where_the_platform_switched_off_the_switch_says_so():
    """Ours would change nothing."""
    platform = {"speculative_decoding": "off", "display_name": "Pendra"}
    menu = menu_of(ready(platform=platform), RUNS)
    assert "speculation" not in enabled(menu)
    assert texts(menu, "platform") == ["it is switched off by Pendra"]


def test_settings_that_can_not_be_read_are_told():
    """They count as off."""
    menu = menu_of(ready(settings_problem="policies.json: can't be read"), RUNS)
    assert texts(menu, "settings problem") == ["Settings: policies.json: can't be read"]


@pytest.mark.parametrize("condition", DOWN)
def test_a_worker_that_is_down_has_no_console_and_no_address(condition: Condition):
    """The address is where it was; nobody listens there."""
    can = enabled(menu_of(down(condition), ENDED))
    assert not {"console", "copy", "speculation"} & can
    assert {"logs", "quit"} <= can


def test_a_click_means_what_its_line_offers():
    """Nothing for lines that are disabled, or gone."""
    menu = menu_of(ready(), RUNS)
    assert menu.action("copy") == Action("copy", "http://127.0.0.1:8321/v1")
    assert menu.action("console") == Action("console", "http://127.0.0.1:8321/")
    assert menu.action("logs") == Action("logs", str(LOGS))
    assert menu.action("start") is None
    assert menu.action("state") is None
    assert menu.action("gone") is None


# --- words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a\n› Quit", "a\x1b[2Jb", "a\u202egpj.exe", "a\u2028b", "a\tb", "a\r\nb\0"]
)
def test_a_name_is_one_printable_line(name: str):
    """Neither a line of ours, nor a terminal's code, nor a mark that turns text round."""
    status = {
        "models": [{"id": name, "is_loaded": True, "speculation": name, "draft_problem": name}],
        "link": {"state": name, "why": name, "name": name},
        "platform": {"speculative_decoding": "off", "display_name": name},
    }
    seen = replace(ready(), status=status, error=name)
    menu = menu_of(seen, replace(ENDED, problem=name), problem=name)
    assert all(item.text.isprintable() and item.whole.isprintable() for item in rows(menu))
    assert len(printed(menu).splitlines()) == len(menu.items) + 1


def test_a_long_name_is_cut_in_its_middle():
    """Its end tells it apart; the tip has it whole."""
    name = "org/" + "x" * 100 + "-4bit"
    item = row(menu_of(with_model(id=name), RUNS), "model 0")
    assert len(item.text) == NAME_CHARS
    assert item.text.startswith("org/x")
    assert item.text.endswith("x-4bit")
    assert item.whole == name


def test_short_text_is_left_alone():
    """Minus signs, accents and apostrophes are no harm."""
    assert clean(f"Off, {MINUS}18% – ada's Mäc") == f"Off, {MINUS}18% – ada's Mäc"
    assert middle("abc", 3) == "abc"
    assert middle("abcdef", 5) == "ab…ef"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0 s"), (61, "1 min"), (7300, "2 h"), (200_000, "2 d")]
)
def test_how_long_is_told_in_one_unit(seconds: float, shown: str):
    """The nearest whole below."""
    assert duration(seconds) == shown


def test_a_printed_line_tells_what_it_can():
    """› can be clicked, ✓ is on, (disabled) can't be clicked now; others only tell."""
    off = ready(settings=SETTINGS["off"])
    lines = printed(menu_of(off, RUNS)).splitlines()
    assert "› ✓ Pause speculation" in lines
    assert "  Start (disabled)" in lines
    assert "  Ready" in lines
