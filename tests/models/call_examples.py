"""One call in the syntax of each parser of mlx-lm, all of the same tool."""

import importlib
from typing import NamedTuple

from mlx_swarm.broker import Tool
from mlx_swarm.broker.models.tool_syntax import ToolSyntax

WEATHER = Tool(
    "get_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
ARGUMENTS = {"city": "Oslo", "days": 2}


class Example(NamedTuple):
    """The family of a parser, and what stands in a call."""

    family: str
    body: str


EXAMPLES = [
    Example("json_tools", '\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n'),
    Example("mistral", 'get_weather[ARGS]{"city": "Oslo", "days": 2}'),
    Example("mistral_list", '[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}]'),
    Example(
        "kimi_k2",
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo", "days": 2}<|tool_call_end|>',
    ),
    Example(
        "kimi_k3",
        '<|open|>call tool="get_weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
        '{"city": "Oslo", "days": 2}<|close|>json<|sep|><|close|>call<|sep|>',
    ),
    Example("pythonic", '[get_weather(city="Oslo", days=2)]'),
    Example("gemma4", 'call:get_weather{city:<|"|>Oslo<|"|>,days:2}'),
    Example("function_gemma", "call:get_weather{city:<escape>Oslo<escape>,days:2}"),
    Example(
        "qwen3_coder",
        "\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n",
    ),
    *(
        Example(
            family,
            "get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n",
        )
        for family in ("glm47", "laguna")
    ),
    Example(
        "longcat",
        "get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Oslo</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
        "<longcat_arg_value>2</longcat_arg_value>\n",
    ),
    Example(
        "minimax_m2",
        '\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n',
    ),
    Example(
        "minicpm5", '"get_weather"><param name="city">Oslo</param><param name="days">2</param>'
    ),
    Example(
        "muse_spark",
        '\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Oslo</atem:parameter>\n'
        '<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n',
    ),
]
FAMILIES = [example.family for example in EXAMPLES]


def syntax_of(family: str) -> ToolSyntax:
    """The syntax that a parser of mlx-lm reads."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{family.removesuffix('_list')}")
    return ToolSyntax(module.tool_call_start, module.tool_call_end, module.parse_tool_call, family)
