"""A client's call and a loaded model → what the engine is asked, and what the client is told.

Owns what of a call depends on its model: the prompt, its own sampling, the grammar in the syntax of
its family, and what can't be had of it. Leaves the line of calls to dispatcher.py, and what holds
for every model to wire/. Engine thread only, but for `check_form`, which any thread may run.
"""

from collections.abc import Mapping
from typing import Any

from mlx_worker.config import Config
from mlx_worker.engine import structure
from mlx_worker.errors import RequestError
from mlx_worker.loaded_model import LoadedModel
from mlx_worker.records import (
    Call,
    Done,
    GenerationRequest,
    Grammar,
    Notice,
    Progress,
    Text,
)

UNHELD = (
    "strict_schema_not_enforced",
    "this model writes tool calls in a form that can't be held to a schema",
)


def has_form(call: Call) -> bool:
    """Whether the call has schemas to look at before it may wait in line."""
    return call.structure is not None or call.tools is not None


def check_form(call: Call) -> None:
    """Raises RequestError for a schema that can't be held to; may take a second."""
    structure.check(call.structure, call.tools)


def request_of(
    model: LoadedModel, call: Call, config: Config, why_off: str | None
) -> tuple[GenerationRequest, Notice | None]:
    """What the engine is asked, and what can't be had of what the call asks.

    why_off  drafting is off for the whole worker, and this is why; None: it isn't
    """
    protocol = model.pair.protocol
    if call.tools is not None and protocol.call is None:
        raise RequestError(
            f"tools: {model.pair.name} has no tool calls", param="tools", hint="leave them out"
        )
    speculation = "off" if why_off else call.speculation
    ids = prompt_ids(model, call)
    room = model.pair.target.context_limit - len(ids)
    max_tokens = call.max_tokens or max(1, min(config.generation.max_tokens, room))
    grammar, notice = grammar_of(model, call)
    request = GenerationRequest(
        prompt_ids=ids,
        max_tokens=max_tokens,
        sampling=model.sampling(call.sampling),
        stop=call.stop,
        speculation=speculation,
        depth=config.speculation.depth if speculation == "on" else None,
        acceptance=config.speculation.acceptance,
        grammar=grammar,
        reads_markers=call.messages is not None,
        may_think=call.enable_thinking and protocol.thinking is not None,
        may_call=call.tools is not None,
        max_calls=1 if call.tools is not None and not call.tools.is_parallel else None,
    )
    return request, notice or undrafted(model, call, why_off)


def prompt_ids(model: LoadedModel, call: Call) -> tuple[int, ...]:
    if call.messages is not None:
        tools = None if call.tools is None else list(call.tools.offered)
        return model.pair.encode_chat(
            call.messages, tools=tools, enable_thinking=call.enable_thinking
        )
    if isinstance(call.prompt, str):
        return model.pair.encode_text(call.prompt)
    return call.prompt


def grammar_of(model: LoadedModel, call: Call) -> tuple[Grammar | None, Notice | None]:
    """What the reply may be, and what of it can't be enforced."""
    tools, protocol = call.tools, model.pair.protocol
    if tools is not None and tools.is_required:
        return structure.calls_grammar(tools, protocol)
    is_unheld = tools and tools.is_strict and not structure.can_hold_calls(protocol)
    if call.structure is not None:
        grammar, notice = structure.structure_grammar(call.structure, tools, protocol)
        return grammar, notice or (UNHELD if is_unheld else None)
    if is_unheld:
        return None, UNHELD
    if tools is None or not tools.is_strict:
        return None, None
    return structure.calls_grammar(tools, protocol)


def undrafted(model: LoadedModel, call: Call, why_off: str | None) -> Notice | None:
    """Why drafting that a call insists on can't be had."""
    if call.speculation != "on":
        return None
    if model.pair.draft_kind is None:
        why = model.pair.draft_problem or f"there is no draft for {model.pair.name}"
    elif why_off:
        why = why_off
    else:
        return None
    return "speculation_unavailable", f"decoded without a draft: {why}"


def opening_of(model: LoadedModel, request: GenerationRequest) -> dict[str, Any]:
    """The fields of Started by which a chat's text is read; none where nobody reads its markers."""
    if not request.reads_markers:
        return {}
    pair = model.pair
    return {"protocol": pair.protocol, "opening": pair.opening(request.prompt_ids)}


def token_names(model: LoadedModel, event: Progress | Text | Done) -> Mapping[int, bytes]:
    """The bytes of every id that an event's logprobs name."""
    if not isinstance(event, Text) or event.logprobs is None:
        return {}
    ids = {one.id for one in event.logprobs} | {id for one in event.logprobs for id, _ in one.top}
    return {id: model.pair.token_bytes(id) for id in ids}
