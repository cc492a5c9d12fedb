"""From the body of a request to a turn, and to the response object that says what was asked."""

import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from msgspec import to_builtins

from ...errors import InvalidRequest
from ...grammar import Grammar
from ...messages import (
    Message,
    NamedTool,
    Tool,
    ToolChoice,
    check_messages,
    check_tool_choice,
    check_tools,
)
from ...sampling import Sampling
from ..bodies import convert
from ..errors import ApiError, invalid
from ..settings import ServerSettings
from ..turns.turn import Caller, Conversation, Turn
from .items import new_id
from .objects import Response
from .wire import ChosenTool, CreateResponse, FunctionTool, TextFormat

Kind = TypeVar("Kind")

SAMPLING = ("top_p", "top_k", "min_p", "seed", "min_tokens", "logit_bias")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NO_THINKING = ("none", "minimal")
CHOICES: tuple[Literal["auto", "none", "required"], ...] = ("auto", "none", "required")


class Tools(NamedTuple):
    """The tools that a reply may call, and which of them it has to."""

    shown: tuple[FunctionTool, ...]
    callable: tuple[Tool, ...]
    choice: ToolChoice


def turn_of(
    body: CreateResponse, messages: tuple[Message, ...], caller: Caller, settings: ServerSettings
) -> Turn:
    """The turn that a request asks for. Raises `ApiError` naming what is wrong."""
    tools = tools_of(body)
    if not messages and not (tools.callable and not body.writes):
        raise invalid("there is nothing to respond to: input is empty", "input")
    _checked("input", check_messages, messages)
    thinking = None
    if body.reasoning is not None and body.reasoning.effort is not None:
        thinking = body.reasoning.effort not in NO_THINKING
    return Turn(
        prompt=Conversation(
            messages=messages,
            tools=tools.callable,
            choice=tools.choice,
            parallel_calls=body.parallel_tool_calls is not False,
            thinking=thinking,
        ),
        caller=caller,
        model=body.model or "",
        max_tokens=body.max_output_tokens,
        sampling=_sampling(body, settings),
        grammar=_grammar(body.text.format if body.text else None),
        stop=_stop(body.stop),
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs or 0,
        generate=body.writes,
    )


def response_of(body: CreateResponse, model: str, settings: ServerSettings) -> Response:
    """The response as it begins."""
    tools, form = tools_of(body), body.text.format if body.text else None
    reasoning = body.reasoning
    return Response(
        id=new_id("resp"),
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=body.model or model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        safety_identifier=body.safety_identifier,
        store=body.is_stored,
        temperature=settings.temperature if body.temperature is None else body.temperature,
        text={
            "format": to_builtins(form or TextFormat("text")),
            "verbosity": (body.text.verbosity if body.text else None) or "medium",
        },
        tool_choice=body.tool_choice or "auto",
        tools=tuple(to_builtins(tool) for tool in tools.shown),
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
    )


def tools_of(body: CreateResponse) -> Tools:
    """The tools of a request. Raises `ApiError`."""
    shown = tuple(_tool(f"tools[{at}]", tool) for at, tool in enumerate(body.tools or ()))
    tools = tuple(
        Tool(tool.name, tool.description or "", tool.parameters or None) for tool in shown
    )
    _checked("tools", check_tools, tools)
    allowed, choice = _choice(body.tool_choice, tools)
    _checked("tool_choice", check_tool_choice, choice, allowed)
    return Tools(shown, allowed, choice)


def _tool(where: str, tool: Mapping[str, Any]) -> FunctionTool:
    if tool.get("type") != "function":
        raise invalid(
            f"{where} is of the type {tool.get('type')!r}; only functions are called here",
            f"{where}.type",
        )
    return _convert(FunctionTool, tool, where)


def _choice(
    given: str | dict[str, Any] | None, tools: tuple[Tool, ...]
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that are left to call, and the choice among them."""
    if given is None:
        return tools, "auto"
    if isinstance(given, str):
        for choice in CHOICES:
            if given == choice:
                return tools, choice
        known = ", ".join(CHOICES)
        raise invalid(f"tool_choice is {given!r}; it must be {known} or a function", "tool_choice")
    chosen = _convert(ChosenTool, given, "tool_choice")
    if chosen.type == "function":
        return tools, NamedTool(chosen.name or "")
    names = {tool.name for tool in chosen.tools}
    unknown = names - {tool.name for tool in tools}
    if unknown:
        raise invalid(
            f"tool_choice allows {', '.join(sorted(unknown))}, not among the tools", "tool_choice"
        )
    return tuple(tool for tool in tools if tool.name in names), chosen.mode


def _sampling(body: CreateResponse, settings: ServerSettings) -> Sampling:
    given = {name: getattr(body, name) for name in (*SAMPLING, *PENALTIES)}
    sampling = Sampling(
        temperature=settings.temperature if body.temperature is None else body.temperature,
        **{name: value for name, value in given.items() if value is not None},
    )
    try:
        sampling.validate()
    except InvalidRequest as error:
        name = str(error).split(" ", 1)[0]
        known = name in CreateResponse.__struct_fields__
        raise invalid(str(error), name if known else "logit_bias") from error
    return sampling


def _grammar(form: TextFormat | None) -> Grammar | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar(json_schema={"type": "object"})
    if form.schema is None:
        raise invalid("text.format.schema is missing", "text.format.schema")
    grammar = Grammar(json_schema=form.schema)
    _checked("text.format.schema", grammar.validate)
    return grammar


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    return tuple(stop or ())


def _checked(param: str, check: Any, *values: Any) -> None:
    try:
        check(*values)
    except InvalidRequest as error:
        raise invalid(str(error), param) from error


def _convert(kind: type[Kind], value: Any, where: str) -> Kind:
    try:
        return convert(kind, value)
    except ApiError as error:
        place = f"{where}.{error.param}" if error.param else where
        raise invalid(f"{where}: {error.message}", place) from error
