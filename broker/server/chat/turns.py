"""From the body of a request to the turns that answer it."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from ...errors import InvalidRequest
from ...grammar import Grammar
from ...messages import NamedTool, Tool, ToolChoice, check_messages, check_tool_choice, check_tools
from ..errors import invalid
from ..openai_fields import check_top, choice_seed
from ..settings import ServerSettings
from ..turns.turn import Caller, Conversation, Turn
from .messages import messages_of, tools_of
from .wire import ChatBody, ChosenTool, FunctionName, ResponseFormat

WITHOUT_THINKING = ("none", "minimal")
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def turns_of(body: ChatBody, caller: Caller, settings: ServerSettings) -> list[Turn]:
    """A turn for each of the `n` choices. Raises `ApiError` naming the field that is wrong."""
    if body.modalities and "audio" in body.modalities:
        raise invalid("modalities has audio; this server writes text", "modalities")
    conversation = _conversation(body)
    top_logprobs = check_top("top_logprobs", body.top_logprobs)
    if top_logprobs and not body.logprobs:
        raise invalid(f"top_logprobs is {top_logprobs}; it needs logprobs: true", "top_logprobs")
    free = conversation.choice in ("auto", "none") or not conversation.tools
    turn = Turn(
        prompt=conversation,
        caller=caller,
        model=body.model or "",
        max_tokens=_max_tokens(body),
        sampling=body.sampling(settings.temperature),
        # Where a tool has to be called there is no text that could keep to a format.
        grammar=_grammar(body.response_format) if free else None,
        stop=body.stops(),
        logprobs=bool(body.logprobs),
        top_logprobs=top_logprobs,
    )
    return [_choice(turn, index) for index in range(body.choices())]


def _choice(turn: Turn, index: int) -> Turn:
    seed = choice_seed(turn.sampling.seed, index)
    return replace(turn, sampling=replace(turn.sampling, seed=seed)) if index else turn


def _conversation(body: ChatBody) -> Conversation:
    messages = messages_of(body.messages)
    _checked("messages", check_messages, messages)
    tools, choice = _tools(body), _tool_choice(body)
    where = "tools" if body.tools else "functions"
    _checked(where, check_tools, tools)
    if isinstance(body.tool_choice, ChosenTool) and body.tool_choice.allowed_tools is not None:
        tools, choice = _allowed(body.tool_choice, tools)
    where = "function_call" if body.tool_choice is None and body.function_call else "tool_choice"
    _checked(where, check_tool_choice, choice, tools)
    return Conversation(
        messages=messages,
        tools=tools,
        choice=choice,
        parallel_calls=body.parallel_tool_calls is not False and not speaks_functions(body),
        thinking=_thinking(body),
    )


def speaks_functions(body: ChatBody) -> bool:
    """Whether a client knows `functions`, one called at a time, and not the `tools` after them."""
    return bool(body.functions) and not body.tools


def _tools(body: ChatBody) -> tuple[Tool, ...]:
    functions = [tool.function for tool in body.tools] if body.tools else body.functions or []
    return tools_of(functions)


def _tool_choice(body: ChatBody) -> ToolChoice:
    match body.tool_choice:
        case None:
            called = body.function_call
            return NamedTool(called.name) if isinstance(called, FunctionName) else called or "auto"
        case ChosenTool(type="function", function=None):
            raise invalid("tool_choice has no function", "tool_choice.function")
        case ChosenTool(type="allowed_tools", allowed_tools=None):
            raise invalid("tool_choice has no allowed_tools", "tool_choice.allowed_tools")
        case ChosenTool(type="function", function=FunctionName() as function):
            return NamedTool(function.name)
        case ChosenTool():
            return "auto"
        case word:
            return word


def _allowed(chosen: ChosenTool, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that are allowed, and whether one of them has to be called."""
    assert chosen.allowed_tools is not None
    names = {each.function.name for each in chosen.allowed_tools.tools}
    unknown = names - {tool.name for tool in tools}
    if unknown:
        raise invalid(
            f"allowed_tools names {min(unknown)!r}; it is not among the {len(tools)} tools given",
            "tool_choice.allowed_tools.tools",
        )
    return tuple(tool for tool in tools if tool.name in names), chosen.allowed_tools.mode


def _thinking(body: ChatBody) -> bool | None:
    kwargs = body.chat_template_kwargs
    if kwargs is not None:
        for said in (kwargs.enable_thinking, kwargs.thinking):
            if said is not None:
                return said
    effort = body.reasoning_effort
    return None if effort is None else effort not in WITHOUT_THINKING


def _max_tokens(body: ChatBody) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        count: int | None = getattr(body, name)
        if count is not None:
            if count < 1:
                raise invalid(f"{name} is {count}; it must be at least 1", name)
            return count
    return None


def _grammar(wanted: ResponseFormat | None) -> Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar(json_schema=ANY_OBJECT)
    if wanted.json_schema is None:
        raise invalid("response_format has no json_schema", "response_format.json_schema")
    schema = wanted.json_schema.schema
    grammar = Grammar(json_schema=ANY_OBJECT if schema is None else schema)
    _checked("response_format.json_schema.schema", grammar.validate)
    return grammar


def _checked(param: str, check: Callable[..., None], *values: object) -> None:
    """Run a check of the broker's; what it refuses is the fault of this field."""
    try:
        check(*values)
    except InvalidRequest as error:
        raise invalid(str(error), param) from error
