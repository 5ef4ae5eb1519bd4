"""The mlx-worker command: flags in, exit codes out.

Owns the commands, their flags and how an error reads. Leaves the work to bench, pair and history,
imported only by the command that needs them, so that only bench and generate load MLX. Standard
output carries data, standard error the talk. Main thread.

Exit codes: 2 for what the caller must change (flags, configuration, model), 130 for Ctrl-C, 1 for
a failure on the way.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mlx_worker import (
    config_cli,
    gateway_cli,
    menubar_cli,
    models_cli,
    service_cli,
    status_cli,
    upkeep_cli,
)
from mlx_worker.errors import (
    ConfigError,
    HubError,
    InvalidParameter,
    ModelError,
    WorkerError,
    shown,
)
from mlx_worker.terminal import check_writable, load_config, speak_anyhow, talk, words

INTERRUPTED = 130
DEPTHS = "0,1,2,3,4"  # that bench compares

app = typer.Typer(
    name="mlx-worker",
    help="Text generation on a Mac, faster by speculative decoding where that pays.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.add_typer(config_cli.app, name="config")
app.add_typer(gateway_cli.app, name="gateway")
app.add_typer(service_cli.app, name="service")

DEFAULT_MODEL = "config, else the first that was pulled"
ModelArgument = Annotated[
    str | None, typer.Argument(help="Name, id or folder.", show_default=DEFAULT_MODEL)
]
ModelFlag = Annotated[
    str | None, typer.Option(help="Name, id or folder.", show_default=DEFAULT_MODEL)
]
DraftFlag = Annotated[
    str | None,
    typer.Option(help="auto, none, lookup, or a name or folder.", show_default="config, else auto"),
]
Number = float | None


def main() -> None:
    """Run the command line; a WorkerError becomes one line and an exit code."""
    speak_anyhow()
    try:
        app(prog_name="mlx-worker")
    except WorkerError as error:
        talk(f"mlx-worker: {error}")
        is_callers = isinstance(error, ConfigError | ModelError | InvalidParameter)
        is_callers = is_callers and not isinstance(error, HubError)
        sys.exit(2 if is_callers else 1)
    except KeyboardInterrupt:
        talk("mlx-worker: interrupted")
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # how typer ends on Ctrl-C, without a word
            talk("mlx-worker: interrupted")
        raise


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        import mlx_worker

        print(mlx_worker.__version__)
        raise typer.Exit()


# --- bench ------------------------------------------------------------------------------------


@app.command()
def bench(
    model: ModelArgument = None,
    draft: DraftFlag = None,
    modes: Annotated[
        str | None,
        typer.Option(
            help="Of off,assistant,model,lookup,auto.", show_default="off and the draft's"
        ),
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="Drafted ids a round, up to 8.", show_default=DEPTHS)
    ] = None,
    workloads: Annotated[
        str | None,
        typer.Option(help="Of chat,code,json,edit,count,story, or the file's.", show_default="all"),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='Lines of {"workload", "messages"} to serve instead.')
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests per workload.", min=1, show_default="3; with --prompts, each line once"
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest reply.", min=1)] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    acceptance: Annotated[
        Literal["coupled", "standard"] | None,
        typer.Option(
            help="Which rule keeps a draft: coupled or standard.",
            show_default="config, else coupled",
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve each request once, as Automatic decides.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the JSON here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the speed-ups here.")
    ] = None,
) -> None:
    """Measure decoding with and without a draft.

    Serves a batch of requests and records the change in latency per request. Every request runs in
    every mode and depth, interleaved. The last line of the output is one JSON object.

    Mode auto lets the worker decide from its own measurements, settles on the batch first, and is
    compared with the best fixed depths. --live serves the requests once, in order, in that mode
    alone, and keeps what was decided for `mlx-worker status --history`.
    """
    check_writable("--json", json_file)
    check_writable("--plot", plot_file)
    wanted_modes, wanted_depths = words(modes), depth_numbers(depths or DEPTHS)
    if live:
        check_unused_by_live(modes=modes, depths=depths, plot=plot_file)
    if (live or "auto" in (wanted_modes or ())) and max_tokens < 2:
        raise ConfigError(
            "--max-tokens: 1, must be at least 2 where Automatic mode is measured",
            hint="a reply of one token has nothing to draft",
        )

    from mlx_worker.bench import (
        facts as facts_of,
        live as lively,
        plot,
        report,
        run,
        workloads as data,
    )
    from mlx_worker.models.locate import locate, locate_draft
    from mlx_worker.tables import console

    run.check_modes(wanted_modes)
    run.check_depths(wanted_depths)
    chosen = data.choose(data.read(prompts) if prompts else None, words(workloads), requests)
    if plot_file:
        plot.check(plot_file)
    settings = load_config()
    entry = entry_of(settings, model, draft)
    loaded = run.load_pair(
        locate(entry.id),
        locate_draft(entry.draft),
        position=settings.speculation.assistant_position,
        context_tokens=entry.context_tokens,
        sampling=entry.sampling.given,
    )
    limits = run.Limits(max_tokens, temperature, acceptance or settings.speculation.acceptance)
    batch = run.prepare(loaded, chosen, ["auto"] if live else wanted_modes, wanted_depths, limits)
    if live:
        line = bench_live(batch, settings.speculation.depth)
        print(line, flush=True)
        if json_file:
            json_file.write_text(line + "\n", encoding="utf-8")
        return
    talk(f"{len(batch.requests)} requests, each decoded in {len(batch.arms)} ways, one at a time")
    if data.repeats(chosen):
        talk("some prompts are served more than once; each counts once in the intervals")
    out = console()
    facts = facts_of.gather(batch.pairs)
    report.print_facts(out, batch, facts)
    if facts.machine.is_busy:
        talk("other programs keep this machine busy, so single figures below are noisy")
    automatic = answer_live = comparison = None
    n_settled = 0
    if "auto" in batch.pairs:
        automatic = lively.Automatic(batch.pairs["auto"], depth=settings.speculation.depth)
        talk("settling Automatic mode on the batch first")
        n_settled = sum(1 for _ in automatic.settle(batch))
        answer_live = automatic.reply_in(batch)
    with report.progress(batch.n_replies) as on_reply:
        served = run.serve(batch, on_reply, answer_live)
    result = run.conclude(batch, served)
    report.print_result(out, batch, result)
    if automatic:
        comparison = lively.compare(automatic, n_settled, served)
        report.print_automatic(out, comparison)
    found = report.as_json(batch, facts, result, comparison)
    line = json.dumps(found, ensure_ascii=False, allow_nan=False)
    print(line, flush=True)  # before the files: minutes of measuring are not lost to a full disk
    if json_file:
        json_file.write_text(line + "\n", encoding="utf-8")
    if plot_file:
        plot.draw(result.rows, f"{loaded.name} on {facts.machine.chip}", plot_file)


def check_unused_by_live(**given: Any) -> None:
    """--live serves in Automatic mode alone, and compares nothing that could be drawn."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"--{name}: {shown(str(value))}, can't be combined with --live",
                hint=f"leave out --{name}, or compare with --modes off,assistant,auto",
            )


def bench_live(batch: Any, depth: int | None) -> str:
    """Serve the batch as it comes in Automatic mode; returns the JSON line that ends the output."""
    from mlx_worker.bench import live, report
    from mlx_worker.decisions import DecisionLog, default_folder

    pair = batch.pairs["auto"]
    log = DecisionLog(default_folder(), {"model": pair.name, "draft": pair.draft_name})
    automatic = live.Automatic(pair, depth=depth, on_concluded=log.hear)
    log.attach(automatic.controller)
    replies, text = [], None
    try:
        for one in live.serve_live(automatic, batch):
            replies.append(one)
            log.flush()
            if one.status.text != text:
                text = one.status.text
                print(f"request {len(replies)}: {text}   ({one.status.why})", flush=True)
    finally:
        log.close()
    talk("every request: mlx-worker status --history")
    return json.dumps(report.live_json(batch, replies), ensure_ascii=False, allow_nan=False)


# --- generate ---------------------------------------------------------------------------------


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads standard input.")],
    model: ModelFlag = None,
    draft: DraftFlag = None,
    speculation: Annotated[
        Literal["auto", "on", "off"] | None, typer.Option(help="Use of the draft.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(help="Drafted ids a round, with --speculation on.", min=0, max=8)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest reply.", min=1)] = None,
    temperature: Annotated[Number, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[Number, typer.Option(help="Keep the likeliest ids up to this sum.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest ids; 0: all.")] = None,
    min_p: Annotated[Number, typer.Option(help="Drop ids below this share of the top.")] = None,
    repetition_penalty: Annotated[Number, typer.Option(help="1 is none.")] = None,
    presence_penalty: Annotated[Number, typer.Option(help="0 is none.")] = None,
    frequency_penalty: Annotated[Number, typer.Option(help="0 is none.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.")
    ] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the model think.")] = False,
) -> None:
    """Answer one prompt.

    The reply goes to standard output, raw: a model's markers for thinking and tool calls are in it.
    Figures go to standard error. What isn't given is what config.yaml says of the model, else its
    own generation_config.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise ConfigError("PROMPT: is empty")
    settings = load_config()
    mode = speculation or settings.speculation.mode
    asked_depth = depth
    depth = settings.speculation.depth if depth is None else depth
    entry = entry_of(settings, model, draft)

    from mlx_worker.pair import load
    from mlx_worker.records import DEFAULT_DEPTH

    with load(
        entry.id,
        entry.draft,
        position=settings.speculation.assistant_position,
        context_tokens=entry.context_tokens,
        sampling=entry.sampling.given,
    ) as pair:
        events = pair.generate(
            [{"role": "user", "content": text}],
            max_tokens=max_tokens or settings.generation.max_tokens,
            speculation="off" if mode == "auto" else mode,  # one reply is too few to compare
            depth=depth,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop=stop,
            acceptance=settings.speculation.acceptance,
            enable_thinking=thinking,
        )
        timing = write_reply(events)
        status = pair.status()
    talk(figures(timing, DEFAULT_DEPTH if depth is None else depth))
    why = explanation(
        mode,
        timing.rounds > 0,
        status,
        is_depth_given=asked_depth is not None,
        wants_draft=entry.draft != "none",
    )
    talk(why)


def write_reply(events: Iterator[Any]) -> Any:
    """Stream the text to standard output; returns the Timing that ends it."""
    from mlx_worker.records import Done, Text

    timing = None
    for event in events:
        if isinstance(event, Text):
            print(event.text, end="", flush=True)
        elif isinstance(event, Done):
            timing = event.timing
    print(flush=True)
    return timing


def figures(timing: Any, depth: int) -> str:
    """`41 tokens · 62.1 tok/s · first after 120 ms · 0.78 s in all · depth 2 · accept 0.71`."""
    parts = [f"{timing.completion_tokens} tokens"]
    if timing.tokens_per_s is not None:
        parts.append(f"{timing.tokens_per_s:.1f} tok/s")
    parts += [f"first after {timing.ttft_ms:.0f} ms", f"{timing.latency_ms / 1000:.2f} s in all"]
    if timing.rounds:
        parts.append(f"depth {depth}")
    if timing.acceptance is not None:
        parts.append(f"accept {timing.acceptance:.2f}")
    if timing.tokens_per_round is not None:
        parts.append(f"{timing.tokens_per_round:.1f} tok/round")
    return " · ".join(parts)


def explanation(
    mode: str,
    has_drafted: bool,
    status: dict[str, Any],
    *,
    is_depth_given: bool = False,
    wants_draft: bool = True,
) -> str:
    """Why this reply was decoded as it was."""
    if has_drafted:
        return f"drafted by {status['draft']} ({status['draft_kind']})"
    if status["draft_kind"] is None:
        if not wants_draft:
            return "plain: no draft was wanted"
        missing = f"no draft was found for {status['model']}; name one with --draft"
        return f"plain: {status['draft_problem'] or missing}"
    if mode == "off":
        return "plain: speculation is off"
    if mode == "on":
        return "plain: at depth 0, or the reply was too short, there is nothing to draft"
    if is_depth_given:
        return "plain: --depth only counts with --speculation on"
    return (
        "plain: one reply is too little to measure whether the draft pays; "
        "compare with `mlx-worker bench`, or draft with --speculation on"
    )


# --- serve ------------------------------------------------------------------------------------


@app.command()
def serve(
    model: ModelFlag = None,
    draft: DraftFlag = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on.", show_default="config, else 127.0.0.1"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="0 takes a free one.", show_default="config, else 8321")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Instead of config.yaml in the folder.")
    ] = None,
    supervised: Annotated[
        bool,
        typer.Option("--supervised", help="Exit with 0 on an error that a restart can't mend."),
    ] = False,
) -> None:
    """Serve the local OpenAI-compatible API and its console.

    Runs until it is told to stop (Ctrl-C), then has 25 s to finish the requests that are there.
    `mlx-worker service logs` shows what it does.
    """
    from mlx_worker.presence import Presence, attended

    def work(presence: Presence) -> int:
        from mlx_worker.config import load, override
        from mlx_worker.serving import DEMO, with_flags

        settings = override(load(config_file), {"server.host": host, "server.port": port})
        if model is None:
            configured_model(settings)
        is_demo_named = DEMO in (model, *(entry.id for entry in settings.models))
        settings = with_flags(settings, model, draft)

        from mlx_worker import worker

        return worker.serve(
            settings, announce, talk, is_demo_named=is_demo_named, presence=presence
        )

    raise typer.Exit(attended(work, is_supervised=supervised, talk=talk))


def announce(address: str) -> None:
    """Where the console is, once requests can be served; nobody has to hear it."""
    with suppress(OSError):
        print(f"console: {address}", flush=True)


status_cli.add_to(app)
models_cli.add_to(app)
menubar_cli.add_to(app)
upkeep_cli.add_to(app)


# --- shared -----------------------------------------------------------------------------------


def configured_model(settings: Any) -> Any:
    """The default model's entry; that there is none but the demo pair is said, with what to do."""
    from mlx_worker import serving
    from mlx_worker.config import memory_bytes
    from mlx_worker.models import catalogue

    entry = serving.default(settings)
    if entry.id == serving.DEMO and not settings.models:
        talk("no model here yet: using the embedded demo pair, a toy that shows how things work")
        if fitting := catalogue.pick(memory_bytes(settings.limits.memory_gb)):
            talk(f"one that fits this machine: mlx-worker pull {fitting.id}")
    return entry


def entry_of(settings: Any, model: str | None, draft: str | None) -> Any:
    """The entry of the model that is named, else of the default; with another draft, if named."""
    from mlx_worker.serving import named

    entry = named(settings, model) if model else configured_model(settings)
    return entry.model_copy(update={"draft": draft}) if draft else entry


def depth_numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in words(text) or []]
    except ValueError:
        raise ConfigError(
            f"--depths: {shown(text)}, must be whole numbers", hint=f"--depths {DEPTHS}"
        ) from None


if __name__ == "__main__":
    main()
