"""`mlx-swarm serve`: the broker over the network until a signal comes."""

import inspect
import logging
import os
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

import typer
from msgspec import Meta

from .errors import InvalidSetting
from .server.config import REPEATED, TYPES, load_settings, option
from .server.settings import ServerSettings

HIDDEN = ("api_keys", "model")


def serve(**options: Any) -> None:
    """Serve a model over OpenAI's and Anthropic's APIs.

    Every option can also stand in a TOML file, as max_rows = 64, or in the environment, as
    MLX_SWARM_MAX_ROWS. API keys are in a file, in MLX_SWARM_API_KEY, or in the file's api_keys.
    """
    file = options.pop("config")
    given = {name: value for name, value in options.items() if value not in (None, [])}
    settings = load_settings(given, os.environ, file)
    if not settings.model:
        raise InvalidSetting("no model is named: mlx-swarm serve MODEL")
    _serve(settings)


def _serve(settings: ServerSettings) -> None:
    import anyio

    from .server.entrance.listening import check_certificate, listen
    from .server.entrance.security import check_binding
    from .server.job import run

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    check_binding(settings)
    check_certificate(settings)
    sockets = listen(settings)
    try:
        ended = anyio.run(run, settings, sockets, _tell)
    finally:
        for each in sockets:
            each.close()
    if ended:
        raise KeyboardInterrupt


def _tell(line: str) -> None:
    typer.echo(f"mlx-swarm: {line}", err=True)


def _parameters() -> list[inspect.Parameter]:
    """One option a setting, all as text: `config` reads them alike wherever they come from."""
    model = typer.Argument(help=_help("model"), show_default=False)
    config = typer.Option(help="TOML file of settings.", show_default="MLX_SWARM_CONFIG")
    options = [_option(field) for field in TYPES if field not in HIDDEN]
    return [
        _parameter("model", Annotated[str | None, model]),
        _parameter("config", Annotated[str | None, config]),
        *options,
    ]


def _option(field: str) -> inspect.Parameter:
    default = getattr(ServerSettings(), field)
    name = option(field)
    shown: Any = str(default) if default and default is not True else False
    if isinstance(default, bool):
        flag = typer.Option(name, help=_help(field))
        return _parameter(field, Annotated[bool | None, flag])
    text = typer.Option(name, help=_help(field), show_default=shown)
    kind: Any = list[str] if field in REPEATED else str
    return _parameter(field, Annotated[kind | None, text])


def _parameter(name: str, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _help(field: str) -> str:
    """What the settings say of a field."""
    kind = TYPES[field]
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next(meta.description for meta in metas if isinstance(meta, Meta) and meta.description)


def command() -> Callable[..., None]:
    """`serve` with its options, for typer."""
    parameters = _parameters()
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {each.name: each.annotation for each in parameters}
    return serve
