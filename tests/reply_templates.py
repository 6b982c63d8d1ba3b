"""Chat templates of our own making, which write calls and reasoning as the formats were published."""

from __future__ import annotations

_CHATML = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}CALL{% endfor %}
{%- else %}{{- m.content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

HERMES = _CHATML.replace(
    "CALL",
    """{%- if not loop.first or m.content %}{{- '\\n' }}{% endif -%}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson + '}\\n</tool_call>' }}""",
)

QWEN3_CODER = _CHATML.replace(
    "CALL",
    """{{- '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}""",
)

GLM45 = """[gMASK]<sop>
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>\\n<think>' + (m.reasoning_content or '') + '</think>' }}
{%- if m.content %}{{- '\\n' + m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>' + c.function.name + '\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\\n' }}
{%- endfor %}{{- '</tool_call>' }}
{%- endfor %}
{%- else %}{{- '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}
{%- else %}{{- m.content }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

MISTRAL = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + ', "id": "' + c.id + '"}' }}
{%- if not loop.last %}{{- ', ' }}{% endif %}
{%- endfor %}{{- ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}
"""

_HEAD, _, _TAIL = MISTRAL.partition("{{- '[TOOL_CALLS] [' }}")
MISTRAL_ARGS = (
    _HEAD
    + """{%- for c in m.tool_calls %}{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}
{%- endfor %}{{- eos_token }}"""
    + _TAIL.partition("{{- ']' + eos_token }}")[2]
)

_DEEPSEEK = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' %}{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] }}
{%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}
{%- for c in m.tool_calls %}CALL{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{% endif %}
{{- eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>OPEN' }}{% endif %}
"""

DEEPSEEK_R1 = _DEEPSEEK.replace("OPEN", "<think>\\n").replace(
    "CALL",
    """{%- if not loop.first %}{{- '\\n' }}{% endif %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments }}
{{- '\\n```<｜tool▁call▁end｜>' }}""",
)

DEEPSEEK_V31 = _DEEPSEEK.replace("OPEN", "</think>").replace(
    "CALL",
    """{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}
{{- '<｜tool▁call▁end｜>' }}""",
)

DEEPSEEK_V32 = (
    _DEEPSEEK.replace("OPEN", "<think>")
    .replace("<｜tool▁calls▁begin｜>", "\\n\\n<｜DSML｜function_calls>\\n")
    .replace("<｜tool▁calls▁end｜>", "</｜DSML｜function_calls>")
    .replace(
        "CALL",
        """{{- '<｜DSML｜invoke name="' + c.function.name + '">\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<｜DSML｜parameter name="' + k + '" string="' + ('true' if v is string else 'false') + '">' }}
{{- (v if v is string else v | tojson) + '</｜DSML｜parameter>\\n' }}
{%- endfor %}{{- '</｜DSML｜invoke>\\n' }}""",
    )
)

MINIMAX_M2 = _CHATML.replace(
    "CALL",
    """{{- '\\n<minimax:tool_call>\\n' if loop.first else '' }}{{- '<invoke name="' + c.function.name + '">\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<parameter name="' + k + '">' + (v if v is string else v | tojson) + '</parameter>\\n' }}
{%- endfor %}{{- '</invoke>\\n' + ('</minimax:tool_call>' if loop.last else '') }}""",
)

KIMI_K2 = """
{%- for m in messages %}
{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}
{%- if m.role == 'tool' %}{{- '## Return of ' + m.tool_call_id + '\\n' }}{% endif %}
{{- m.content or '' }}
{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}
{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor %}{{- '<|tool_calls_section_end|>' }}{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""

HARMONY = """
{%- for m in messages %}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}
{%- if m.reasoning %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' + f.arguments | tojson }}
{{- '<|call|>' }}
{%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""

LFM2 = _CHATML.replace(
    "CALL",
    """{{- '<|tool_call_start|>[' if loop.first else ', ' }}{{- c.function.name + '(' }}
{%- for k, v in c.function.arguments | items %}
{{- (', ' if not loop.first else '') + k + '=' }}{{- v | tojson if v is string else v }}
{%- endfor %}{{- ')' + (']<|tool_call_end|>' if loop.last else '') }}""",
)

GEMMA4 = """
{%- macro value(v) %}
{%- if v is string %}{{- '<|"|>' + v + '<|"|>' }}
{%- elif v is mapping %}{{- '{' }}{{- members(v) }}{{- '}' }}
{%- elif v is sequence %}{{- '[' }}
{%- for one in v %}{{- value(one) + ('' if loop.last else ',') }}{% endfor %}{{- ']' }}
{%- else %}{{- v | tojson }}{% endif %}
{%- endmacro %}
{%- macro members(v) %}
{%- for name, one in v | dictsort %}{{- name + ':' + value(one) + ('' if loop.last else ',') }}{% endfor %}
{%- endmacro %}
{{- bos_token }}
{%- for m in messages %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- (m.content or '').split('<channel|>')[-1] }}
{%- for c in m.tool_calls or [] %}
{{- '<|tool_call>call:' + c.function.name + '{' }}{{- members(c.function.arguments) }}{{- '}<tool_call|>' }}
{%- endfor %}
{{- '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}{% endif %}
"""

PLAIN = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

FORMATS = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "derived": MISTRAL_ARGS,
    "deepseek_v3": DEEPSEEK_R1,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "minimax_m2": MINIMAX_M2,
    "kimi_k2": KIMI_K2,
    "lfm2": LFM2,
    "gemma4": GEMMA4,
    "harmony": HARMONY,
}
"""By the names of what is to be found of them."""
