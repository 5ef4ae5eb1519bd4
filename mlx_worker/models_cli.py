"""The commands about models: what is here, getting it, removing it, a smaller draft for it.

Owns their flags and what they print. Leaves files to models/, and measuring a draft to the bench,
imported only by the command that needs them. Main thread.
"""

import json
from typing import Annotated, Any

import typer

from mlx_worker.errors import ConfigError, shown
from mlx_worker.terminal import load_config, talk, words

SHORT = {  # where the first sentence is too long for the list of commands
    "models": "Show the models that were pulled, and their drafts.",
    "remove": "Delete a pulled model, and a draft that no other uses.",
}


def add_to(app: typer.Typer) -> None:
    for command in (models, pull, remove):
        app.command(short_help=SHORT.get(command.__name__))(command)
    app.command("quantize-draft")(quantize_draft)


# --- models -----------------------------------------------------------------------------------


def models(
    has_catalogue: Annotated[
        bool, typer.Option("--catalogue", help="Every model with a short name, and what fits here.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show the models that were pulled, their drafts, and whether those pay."""
    from mlx_worker.config import memory_bytes
    from mlx_worker.models import listing, report
    from mlx_worker.models.store import Store
    from mlx_worker.tables import console

    store = Store.default()
    settings = load_config()
    budget = memory_bytes(settings.limits.memory_gb)
    if has_catalogue and not as_json:
        report.print_catalogue(console(), listing.catalogue_json(store, budget))
        return
    found = listing.pulled_json(store, verdicts())
    loaded = loaded_models(settings.server)
    if as_json:
        for one in found:
            one["is_loaded"] = None if loaded is None else one["id"] in loaded
        disk = listing.disk_json(store)
        rows = {"catalogue": listing.catalogue_json(store, budget)} if has_catalogue else {}
        print(json.dumps({"models": found, "disk": disk, **rows}, ensure_ascii=False))
    else:
        report.print_models(console(), found, loaded)


def pull(
    model: Annotated[str, typer.Argument(help="A short name, or an id of the hub.")],
    draft: Annotated[
        str | None,
        typer.Option(
            help="auto, none, or an id of the hub.", show_default="config, the last, else auto"
        ),
    ] = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="The model alone.")] = False,
    revision: Annotated[
        str | None,
        typer.Option(
            help="Branch, tag or commit of the model.", show_default="the last, else main"
        ),
    ] = None,
) -> None:
    """Get a model and its draft, or what is missing of them.

    Files go to the hub's own cache (HF_HOME) and are checked. Interrupted, the same command goes
    on from where it was.
    """
    if draft and no_draft:
        raise ConfigError("--draft and --no-draft: only one of them can be given")
    from mlx_worker import serving
    from mlx_worker.models import catalogue, pull as pulling, report
    from mlx_worker.models.hub import Hub
    from mlx_worker.models.store import Store

    id = catalogue.canonical(model)
    wanted = "none" if no_draft else draft
    if wanted in (None, "auto"):
        wanted = serving.drafts(load_config()).get(id, wanted)
    events = pulling.pull(model, Store.default(), Hub(), draft=wanted, revision=revision)
    try:
        finished = report.follow(events, talk)
    except KeyboardInterrupt:
        talk("what came is kept; the same command goes on from here")
        raise
    for line in report.result_lines(finished):
        print(line)
    is_default = serving.default(load_config()).id == finished.pulled.id
    talk(f"next: mlx-worker serve{'' if is_default else f' --model {finished.pulled.id}'}")


def remove(model: Annotated[str, typer.Argument(help="As `mlx-worker models` calls it.")]) -> None:
    """Delete a pulled model, and its draft unless another model uses it."""
    from mlx_worker import serving
    from mlx_worker.models import catalogue
    from mlx_worker.models.report import gigabytes
    from mlx_worker.models.store import Store

    store = Store.default()
    pulled = store.find(catalogue.canonical(model))
    if pulled is None:
        known = ", ".join(one.id for one in store.models()) or "none"
        raise ConfigError(f"{shown(model)} was not pulled", hint=f"pulled: {known}")
    print(f"{pulled.id} is gone; freed {gigabytes(store.remove(pulled))}")
    if pulled.id in serving.configured(load_config()):
        talk("config.yaml still lists it; a worker serves it no more without its files")


# --- quantize-draft ---------------------------------------------------------------------------


def quantize_draft(
    model: Annotated[str, typer.Argument(help="As `mlx-worker models` calls it.")],
    bits: Annotated[int, typer.Option(help="Of a weight: 2, 3, 4, 5, 6 or 8.")] = 4,
    group_size: Annotated[int, typer.Option(help="Of weights: 32, 64 or 128.")] = 64,
    no_bench: Annotated[
        bool, typer.Option("--no-bench", help="Make the copy, measure and choose nothing.")
    ] = False,
    workloads: Annotated[
        str | None,
        typer.Option(help="Of chat,code,json,edit,count,story.", show_default="all"),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests per workload.", min=1, show_default="3")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest reply.", min=2)] = 96,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Quantise a model's draft; use it where it is faster.

    Plain decoding, the published draft and the copy serve the same requests, interleaved. The copy
    is chosen if the 90% interval of its gain over the published draft lies above zero; a later run
    measures again. The text of replies is the same with either.
    """
    from mlx_worker.bench import drafts, workloads as data
    from mlx_worker.models import smaller
    from mlx_worker.models.store import Store

    drafts.check_quantization(bits, group_size)
    prompts = data.choose(None, words(workloads), requests)
    store = Store.default()
    plan = smaller.plan(model, store, bits, group_size)
    result: dict[str, Any] = {"model": plan.id, "draft": plan.draft, "copy": None, "bench": None}
    if not plan.is_made:
        copy = drafts.quantize_assistant(plan.draft_folder, plan.copy.folder, bits, group_size)
        talk(drafts.copy_line(copy))
        store.keep_smaller(plan.id, plan.copy)
        result["copy"] = drafts.copy_json(copy)
    kept, line = plan.copy, f"kept, not measured: {plan.copy.folder}"
    if not no_bench:
        kept, line, result["bench"] = bench_drafts(plan, prompts, max_tokens, has_table=not as_json)
        store.keep_smaller(plan.id, kept)
    if as_json:
        result |= {"folder": str(kept.folder), "is_chosen": kept.is_chosen, "text": line}
        line = json.dumps(result, ensure_ascii=False, allow_nan=False)
    print(line)


def bench_drafts(
    plan: Any, prompts: list[Any], max_tokens: int, *, has_table: bool
) -> tuple[Any, str, dict[str, Any]]:
    """Measure a copy against its draft: the copy as it is to be kept, in words, and the figures."""
    from dataclasses import replace

    from mlx_worker.bench import drafts, run
    from mlx_worker.tables import console

    speculation = load_config().speculation
    batch = drafts.prepare(
        str(plan.model_folder),
        str(plan.draft_folder),
        str(plan.copy.folder),
        prompts,
        run.Limits(max_tokens, acceptance=speculation.acceptance),
        speculation.assistant_position,
    )
    talk(f"{len(prompts)} requests, each decoded in {len(batch.arms)} ways, one at a time")
    found = drafts.measure(batch)
    if found and has_table:
        drafts.print_comparison(console(), batch, found, plan.copy.bits)
    kept = replace(plan.copy, is_chosen=found is not None and found.is_smaller_faster)
    return kept, drafts.choice_line(found, plan.copy.bits), drafts.as_json(batch, found)


# --- shared by these --------------------------------------------------------------------------


def verdicts() -> dict[tuple[str, str | None], str]:
    """(model, draft) → what was last found out about it."""
    from mlx_worker import decisions, history

    kept = decisions.read(decisions.default_folder(), has_rounds=False)
    found: dict[tuple[str, str | None], str] = {}
    for each in kept:
        text = history.status_after(each.latest).text if each.latest else None
        if text:
            found[each.model, each.draft] = text
    return found


def loaded_models(server: Any) -> set[str] | None:
    """What a worker that runs on this machine has in memory; None where none answers."""
    from mlx_worker.config import reachable
    from mlx_worker.errors import WorkerError
    from mlx_worker.local import ask

    try:
        found = ask(f"http://{reachable(server.host)}:{server.port}/", "/status")["models"]
        return {one["id"] for one in found if one["is_loaded"]}
    except (WorkerError, KeyError, TypeError):
        return None
