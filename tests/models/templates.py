"""Chat templates in the styles of well-known families, short, and written for these tests."""

from mlx_swarm.broker.models import LoadedModel, load
from mlx_swarm.broker.models.tool_syntax import ToolSyntax

TINY = "synthetic:llama?layers=1&hidden=16&heads=1"

# Tools in the system turn, results between marks in a user's turn, calls as JSON; reasoning of
# earlier turns is left out.
CHATML_TOOLS = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for tool_call in message.tool_calls or [] %}
{%- set tool_call = tool_call.function %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}{% endif %}"""

# Users and assistants take turns; the system message goes into the first user's.
ALTERNATING = """\
{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}{% set first = '' %}{% set turns = messages %}{% endif %}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}
{%- endif %}
{{- '<start>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- (first if loop.first else '') + message.content | trim + '<end>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start>model\\n' }}{% endif %}"""

# Tools before the last user's turn, ids of nine characters, users and assistants take turns.
BRACKETS = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}
{%- set ns = namespace(index=0) %}{% set users = turns | selectattr('role', 'eq', 'user') | list %}
{%- for message in turns %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}
{%- endfor %}
{%- for message in turns %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + (system + '\\n\\n' if loop.first and system else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of length 9') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}{{ '</s>' }}
{%- elif message.role == 'assistant' %}{{ message.content + '</s>' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.tool_call_id + ':' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}
{%- endfor %}"""

# A header with dates in the system turn, always; one call a turn, with arguments as JSON.
DATED = """\
{{- '<|begin|>' }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{- '<|head|>system<|/head|>\\n\\nToday Date: ' + date_string | default('26 Jul 2024') + '\\n\\n' }}
{%- if tools %}{{ 'Functions: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{{- system + '<|eot|>' }}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('single tool-calls at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|head|>assistant<|/head|>\\n\\n<tool_call>{"name": "' + call.name + '", ' }}
{{- '"arguments": ' + call.arguments | tojson + '}</tool_call><|eot|>' }}
{%- elif message.role == 'tool' %}
{{- '<|head|>ipython<|/head|>\\n\\n' + message.content | tojson + '<|eot|>' }}
{%- else %}
{{- '<|head|>' + message.role + '<|/head|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""

# Every system message goes to the top; thoughts in earlier replies are cut out; arguments are
# text; a reply begins within its reasoning.
HOISTING = """\
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{% set ns.system = ns.system + message['content'] %}{% endif %}
{%- endfor %}
{{- '<bos>' + ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}
{%- elif message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}
{{- '<|Assistant|><|call|>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] }}
{%- endfor %}
{%- elif message['role'] == 'assistant' %}
{{- '<|Assistant|>' + message['content'].split('</think>')[-1] + '<|end|>' }}
{%- elif message['role'] == 'tool' %}{{ '<|out|>' + message['content'] }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""


def with_template(
    template: str, syntax: ToolSyntax | None = None, *, thinks: bool = False, bos: str = ""
) -> LoadedModel:
    """A tiny model of bytes with a chat template, and with what mlx-lm would infer from it."""
    model = load(TINY)
    model.tokenizer.chat_template = template
    if bos:
        model.tokenizer.add_special_tokens({"bos_token": bos})
    if thinks:
        model.tokenizer.add_tokens(["<think>", "</think>"])
        model.tokenizer._think_start, model.tokenizer._think_end = "<think>", "</think>"
    if syntax is not None:
        model.tokenizer._tool_call_start = syntax.start
        model.tokenizer._tool_call_end = syntax.end
        model.tokenizer._tool_parser = syntax.parse
    return model
