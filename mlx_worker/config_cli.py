"""The command `mlx-worker config`: where the settings are, what they are, and changing one.

Owns its flags and how a change is told. Leaves the file to config_file.py. Main thread.
"""

import sys
from typing import Annotated

import typer

from mlx_worker.errors import ConfigError

app = typer.Typer(
    help="Show the settings, and change them in config.yaml.",
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def folder(context: typer.Context) -> None:
    """Show the settings, and change them in config.yaml.

    Without a command: print the folder of config.yaml.
    """
    if context.invoked_subcommand is None:
        from mlx_worker.config import home

        print(home())


@app.command()
def show() -> None:
    """Print every setting in force.

    Defaults, then config.yaml, then MLX_WORKER_* variables; keys are masked.
    """
    import yaml

    from mlx_worker.config import load

    masked = load().model_dump(mode="json")
    print(yaml.safe_dump(masked, sort_keys=False), end="")


@app.command("set")
def set_key(
    key: Annotated[
        str, typer.Argument(help="As in server.port, models, models.ID.draft.", metavar="KEY")
    ],
    value: Annotated[
        str | None,
        typer.Argument(help="In YAML; - reads standard input.", metavar="VALUE"),
    ] = None,
    unset: Annotated[bool, typer.Option("--unset", help="Back to the default.")] = False,
) -> None:
    """Change one setting in config.yaml.

    All else in the file stays as it is, comments too. A running worker reads it at its next start.

    Keys (server.api_key, gateway.key) are read from standard input alone, as VALUE -, so that no
    list of processes and no history shows them. For a value that begins with a dash:
    config set KEY -- VALUE.
    """
    from mlx_worker import config_file
    from mlx_worker.config import CONFIG_FILE, SECRET_KEYS, home

    if (value is None) != unset:
        what = "a value and --unset exclude each other" if unset else "needs a value"
        raise ConfigError(f"{key}: {what}", hint=f"mlx-worker config set {key} VALUE")
    if key in SECRET_KEYS and value not in (None, "-"):
        raise ConfigError(
            f"{key}: can't be given on the command line, where others can see it",
            hint=f"mlx-worker config set {key} - reads it from standard input",
        )
    text = sys.stdin.read().strip() if value == "-" else value
    file = home() / CONFIG_FILE
    if text is None:
        config_file.unset(file, key)
        print(f"{key} is at its default again, from the worker's next start on")
    else:
        config_file.set(file, key, text)
        shown = "********" if key in SECRET_KEYS else text
        print(f"{key}: {shown}, from the worker's next start on")
