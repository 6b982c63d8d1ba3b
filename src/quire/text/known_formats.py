"""Published formats of replies, for templates from which they cannot be found, and for `--tool-format`."""

from __future__ import annotations

import msgspec

from quire.text.reply_syntax import (
    NINE,
    NUMBER,
    ContentSyntax,
    ParameterSyntax,
    ReasoningSyntax,
    ReplySyntax,
    ToolSyntax,
)

REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),  # Gemma 4
)
"""Delimiters of reasoning that a template need not print: many drop the reasoning of earlier turns."""

_THINK = ReasoningSyntax(*REASONING[0])

_HARMONY = [
    ToolSyntax(trigger=name, before_name=name, before_arguments=arguments, single=True)
    for name, arguments in (
        ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
        ("<|channel|>commentary to=functions.", " json<|message|>"),
        (" to=functions.", "<|channel|>commentary json<|message|>"),  # as its template prints it
        (" to=functions.", "<|channel|>commentary <|constrain|>json<|message|>"),
    )
]
"""Calls of gpt-oss, whose models write the recipient behind the channel or before it, and the type with its marker or
without it."""

KNOWN: dict[str, ReplySyntax] = {
    "hermes": ReplySyntax(
        "hermes",
        tools=ToolSyntax(
            trigger="<tool_call>",
            before_name='<tool_call>\n{"name": "',
            before_arguments='", "arguments": ',
            after_arguments="}\n</tool_call>",
            between="\n",
        ),
        reasoning=_THINK,
    ),
    "qwen3_coder": ReplySyntax(
        "qwen3_coder",
        tools=ToolSyntax(
            trigger="<tool_call>",
            before_name="<tool_call>\n<function=",
            before_arguments=">\n",
            after_arguments="</function>\n</tool_call>",
            between="\n",
            parameters=ParameterSyntax("<parameter=", ">\n", "\n</parameter>\n"),
        ),
        reasoning=_THINK,
    ),
    "llama3_json": ReplySyntax(
        "llama3_json",
        tools=ToolSyntax(
            trigger='{"name": "',
            before_name='{"name": "',
            before_arguments='", "parameters": ',
            after_arguments="}",
            anchored=True,
            single=True,
        ),
    ),
    "mistral": ReplySyntax(
        "mistral",
        tools=ToolSyntax(
            trigger="[TOOL_CALLS]",
            begin="[TOOL_CALLS] [",
            before_name='{"name": "',
            before_arguments='", "arguments": ',
            after_arguments=f', "id": "{NINE}"}}',
            between=", ",
            end="]",
        ),
        reasoning=ReasoningSyntax(*REASONING[1]),
    ),
    "deepseek_v3": ReplySyntax(
        "deepseek_v3",
        tools=ToolSyntax(
            trigger="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁calls▁begin｜>",
            before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            before_arguments="\n```json\n",
            after_arguments="\n```<｜tool▁call▁end｜>",
            between="\n",
            end="<｜tool▁calls▁end｜>",
        ),
        reasoning=_THINK,
    ),
    "deepseek_v31": ReplySyntax(
        "deepseek_v31",
        tools=ToolSyntax(
            trigger="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁calls▁begin｜>",
            before_name="<｜tool▁call▁begin｜>",
            before_arguments="<｜tool▁sep｜>",
            after_arguments="<｜tool▁call▁end｜>",
            end="<｜tool▁calls▁end｜>",
        ),
        reasoning=_THINK,
    ),
    "glm45": ReplySyntax(
        "glm45",
        tools=ToolSyntax(
            trigger="<tool_call>",
            before_name="<tool_call>",
            before_arguments="\n",
            after_arguments="</tool_call>",
            between="\n",
            parameters=ParameterSyntax("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        reasoning=_THINK,
    ),
    "glm47": ReplySyntax(
        "glm47",
        tools=ToolSyntax(
            trigger="<tool_call>",
            before_name="<tool_call>",
            before_arguments="",
            after_arguments="</tool_call>",
            parameters=ParameterSyntax("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        ),
        reasoning=_THINK,
    ),
    "deepseek_v32": ReplySyntax(
        "deepseek_v32",
        tools=ToolSyntax(
            trigger="<｜DSML｜function_calls>",
            begin="<｜DSML｜function_calls>",
            before_name='\n<｜DSML｜invoke name="',
            before_arguments='">\n',
            after_arguments="</｜DSML｜invoke>",
            end="\n</｜DSML｜function_calls>",
            parameters=ParameterSyntax(
                '<｜DSML｜parameter name="', '" string="true">', "</｜DSML｜parameter>\n", '" string="false">'
            ),
        ),
        reasoning=_THINK,
    ),
    "minimax_m2": ReplySyntax(
        "minimax_m2",
        tools=ToolSyntax(
            trigger="<minimax:tool_call>",
            begin="<minimax:tool_call>",
            before_name='\n<invoke name="',
            before_arguments='">\n',
            after_arguments="</invoke>",
            end="\n</minimax:tool_call>",
            parameters=ParameterSyntax('<parameter name="', '">', "</parameter>\n"),
        ),
        reasoning=_THINK,
    ),
    "kimi_k2": ReplySyntax(
        "kimi_k2",
        tools=ToolSyntax(
            trigger="<|tool_calls_section_begin|>",
            begin="<|tool_calls_section_begin|>",
            before_name="<|tool_call_begin|>functions.",
            before_arguments=f":{NUMBER}<|tool_call_argument_begin|>",
            after_arguments="<|tool_call_end|>",
            end="<|tool_calls_section_end|>",
            numbered=True,
        ),
        reasoning=_THINK,
    ),
    "lfm2": ReplySyntax(
        "lfm2",
        tools=ToolSyntax(
            trigger="<|tool_call_start|>",
            begin="<|tool_call_start|>[",
            before_name="",
            before_arguments="(",
            after_arguments=")",
            between=", ",
            end="]<|tool_call_end|>",
            parameters=ParameterSyntax("", "=", "", python=True),
        ),
    ),
    "granite": ReplySyntax(
        "granite",
        tools=ToolSyntax(
            trigger="<|tool_call|>",
            begin="<|tool_call|>[",
            before_name='{"name": "',
            before_arguments='", "arguments": ',
            after_arguments="}",
            between=", ",
            end="]",
        ),
        reasoning=_THINK,
    ),
    "gemma4": ReplySyntax(
        "gemma4",
        tools=ToolSyntax(
            trigger="<|tool_call>",
            before_name="<|tool_call>call:",
            before_arguments="{",
            after_arguments="}<tool_call|>",
            parameters=ParameterSyntax("", ":", "", quote='<|"|>'),
        ),
        reasoning=ReasoningSyntax(*REASONING[3]),
    ),
    "harmony": ReplySyntax(
        "harmony",
        reasoning=ReasoningSyntax("<|channel|>analysis<|message|>", "<|end|>"),
        tools=msgspec.structs.replace(_HARMONY[0], others=tuple(_HARMONY[1:])),
        content=ContentSyntax(
            ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"), "<|end|>", "<|start|>assistant"
        ),
    ),
}
"""Published formats, by the names of vLLM's parsers."""
