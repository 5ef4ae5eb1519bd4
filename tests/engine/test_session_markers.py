"""A reply read by its markers: thinking is counted, stops count in content, calls can end it."""

from typing import Any

import pytest

from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.records import Sampling, Text
from tests.demo_prompts import TOOLS, prompt_of
from tests.tiny import Written, write

THINK_CLOSE = 101
THINK = "<|channel>thought\n32 + 20 = 52. 52 + 1 = 53.\n<channel|>32 + 21 = 53."
CALL = "<|tool_call>call:start_timer{duration:25}<tool_call|>"


@pytest.fixture(scope="module")
def demo() -> LoadedPair:
    return load_pair("demo")


def thought(demo: LoadedPair, max_tokens: int = 200, **request: Any) -> Written:
    """What the demo thinks and says to 32 + 21."""
    prompt = prompt_of(demo, "What is 32 + 21?", enable_thinking=True)
    return write(demo, prompt, max_tokens, **{"reads_markers": True, **request})


def called(demo: LoadedPair, **request: Any) -> Written:
    prompt = prompt_of(demo, "Wake me in 25 minutes.", tools=[TOOLS["start_timer"]])
    return write(demo, prompt, 200, **{"reads_markers": True, "may_call": True, **request})


@pytest.mark.parametrize("speculation", ["off", "on"])
def test_thinking_is_counted_with_its_markers(demo: LoadedPair, speculation: str):
    """Whether one id comes at a time or several."""
    reply = thought(demo, speculation=speculation)
    assert reply.text == THINK
    assert reply.done.usage.reasoning_tokens == reply.ids.index(THINK_CLOSE) + 1
    assert reply.done.notice is None


def test_a_reply_whose_markers_nobody_reads_has_no_thinking(demo: LoadedPair):
    """The older endpoint and the Python door give the text as it is."""
    assert thought(demo, reads_markers=False).done.usage.reasoning_tokens == 0


def test_a_reply_that_ends_while_thinking_says_so(demo: LoadedPair):
    """Its content is empty, and the client should know why."""
    done = thought(demo, max_tokens=8).done
    assert done.finish_reason == "length"
    assert done.usage.reasoning_tokens == 8
    assert done.notice is not None
    assert done.notice[0] == "truncated_during_reasoning"
    assert "max_tokens (8)" in done.notice[1]


def test_a_reply_cut_after_its_thinking_needs_no_notice(demo: LoadedPair):
    """finish_reason says it."""
    n_thinking = thought(demo).done.usage.reasoning_tokens
    done = thought(demo, max_tokens=n_thinking + 2).done
    assert (done.finish_reason, done.notice) == ("length", None)


def test_a_prompt_that_opens_the_thinking_counts_from_the_first_id(demo: LoadedPair):
    """Templates of some models end with the marker."""
    prompt = prompt_of(demo, "What is 32 + 21?", enable_thinking=True)
    opened = demo.tokenizer.encode("<|channel>thought\n", add_special_tokens=False)
    reply = write(demo, [*prompt, *opened], 200, reads_markers=True)
    assert demo.opening([*prompt, *opened]) == "<|channel>thought\n"
    assert reply.done.usage.reasoning_tokens == reply.ids.index(THINK_CLOSE) + 1


@pytest.mark.parametrize("speculation", ["off", "on"])
@pytest.mark.parametrize(("reads_markers", "ends"), [(True, "32 + 21 = "), (False, "32 + 20 = ")])
def test_a_stop_string_is_looked_for_in_what_is_said(
    demo: LoadedPair, speculation: str, reads_markers: bool, ends: str
):
    """Of a raw text, that is all of it."""
    reply = thought(demo, stop=("5",), reads_markers=reads_markers, speculation=speculation)
    assert reply.text.endswith(ends)
    assert reply.done.finish_reason == "stop"


@pytest.mark.parametrize("speculation", ["off", "on"])
def test_a_reply_may_be_one_call_long(demo: LoadedPair, speculation: str):
    """parallel_tool_calls false: whatever would have followed."""
    reply = called(demo, max_calls=1, speculation=speculation)
    assert (reply.text, reply.done.finish_reason) == (CALL, "stop")
    assert len(reply.ids) < len(called(demo, speculation=speculation).ids)


def test_the_events_say_where_markers_stand(demo: LoadedPair):
    """In the piece that has them."""
    texts = [event for event in called(demo).events if isinstance(event, Text)]
    marked = [event.text[at : at + 6] for event in texts for at in event.marks]
    assert marked == ["<|tool", "<tool_"]


def test_only_the_logprobs_of_what_is_said_are_content(demo: LoadedPair):
    """Thinking, its markers and the end are not."""
    reply = thought(demo, sampling=Sampling(logprobs=0))
    said = [one.id for one in reply.logprobs if one.is_content]
    assert demo.tokenizer.decode(said) == "32 + 21 = 53."
