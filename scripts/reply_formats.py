"""The table of docs/agents.md: how the models of each family in docs/models.md write calls and reasoning, as it is
found in their published chat templates.

    python scripts/reply_formats.py TEMPLATES            # say what is wrong; the exit code is 1 if anything is
    python scripts/reply_formats.py TEMPLATES --write    # write the table

TEMPLATES is a folder of published templates, NAME.jinja, such as `vendor/llama.cpp/models/templates` in the source
distribution of llama-cpp-python.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from quire.text.chat_template import ChatTemplate
from quire.text.reply_syntax import PLACEHOLDERS, ReplySyntax

ROOT = Path(__file__).resolve().parent.parent
AGENTS, MODELS = ROOT / "docs" / "agents.md", ROOT / "docs" / "models.md"
HEAD = "| family | template | calls | reasoning |\n|---|---|---|---|\n"

TEMPLATES = {
    "Qwen3": ("Qwen-Qwen3-0.6B",),
    "Qwen3-Embedding": (),
    "Qwen3-VL (dense)": (),
    "Qwen3.5, 3.6, 3.8 (dense)": ("Qwen3.5-4B",),
    "Qwen3.5, 3.6, 3.8 (experts)": (),
    "Qwen3-Next": (),
    "Kimi Linear": (),
    "Qwen2, 2.5": ("Qwen-Qwen2.5-7B-Instruct", "Qwen-QwQ-32B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"),
    "Qwen2.5-VL": (),
    "Llama 2, 3.x": (
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "meta-llama-Llama-3.3-70B-Instruct",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    ),
    "Mistral": ("mistralai-Mistral-Nemo-Instruct-2407", "unsloth-mistral-Devstral-Small-2507"),
    "Mistral Small 3.1, 3.2": ("Mistral-Small-3.2-24B-Instruct-2506",),
    "Ministral 3": ("mistralai-Ministral-3-14B-Reasoning-2512",),
    "Mistral Small 4": (),
    "Mixtral": (),
    "Qwen2-MoE": (),
    "Qwen3-MoE": ("Qwen3-Coder",),
    "DeepSeek V2, V2-Lite": (),
    "DeepSeek V3, V3.1, R1; Kimi K2": ("deepseek-ai-DeepSeek-V3.1", "moonshotai-Kimi-K2"),
    "DeepSeek V3.2": ("deepseek-ai-DeepSeek-V3.2",),
    "GLM-5 to 5.2": (),
    "Kimi K2.5, K2.6": (),
    "GLM-4.7-Flash": ("GLM-4.7-Flash",),
    "GLM-4.5, 4.6, 4.7": ("GLM-4.6",),
    "GLM-4 (0414)": (),
    "MiniMax M2, M2.1, M2.5": ("MiniMax-M2",),
    "Phi-3, 3.5, Phi-4, Phi-4-mini": ("microsoft-Phi-3.5-mini-instruct", "phi4mini_own"),
    "SmolLM3": ("HuggingFaceTB-SmolLM3-3B",),
    "OLMo 2": (),
    "OLMo 3": (),
    "EXAONE 4.0": (),
    "Gemma 3": ("google-gemma-2-2b-it",),
    "EmbeddingGemma": (),
    "Gemma 4": ("google-gemma-4-31B-it",),
    "Gemma 4 12B": (),
    "gpt-oss": ("openai-gpt-oss-120b",),
    "Granite 3, 4.1 (dense)": ("ibm-granite-granite-3.3-2B-Instruct", "ibm-granite-granite-4.1"),
    "Granite 4.0": ("ibm-granite-granite-4.0",),
    "LFM2, LFM2.5": ("LFM2.5-Instruct",),
    "LFM2 (experts)": ("LFM2-8B-A1B", "LFM2.5-8B-A1B"),
    "Nemotron 3, Nemotron-H": ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-Nano-v2"),
    "Seed-OSS": ("ByteDance-Seed-OSS",),
    "ERNIE 4.5 (dense)": (),
    "Hunyuan (dense)": (),
    "Hy3": ("tencent-Hy3",),
}
"""The published templates that are at hand, by family."""

NO_CHATS = dict.fromkeys(("Qwen3-Embedding", "EmbeddingGemma"), "embeddings only: no chats")
"""Families without a template of chats, and why."""

_FAMILY = re.compile(r"^\| ([^|`]+?)(?: ○)? \| `", re.MULTILINE)
_TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")


def main() -> int:
    """1 if anything is wrong and was not written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("templates", type=Path, help="the folder of published templates")
    parser.add_argument("--write", action="store_true", help="write the table")
    given = parser.parse_args()
    made, text = table(lambda name: syntax_of(given.templates / f"{name}.jinja")), AGENTS.read_text("utf-8")
    if given.write:
        AGENTS.write_text(_TABLE.sub(lambda _: made, text), "utf-8")
    stale = [] if given.write or made in text else [f"the table in {AGENTS} is not what is found; --write writes it"]
    wrong = [*wrong_families(), *stale]
    print("\n".join(wrong) or f"docs/agents.md: {len(TEMPLATES)} families")
    return 1 if wrong else 0


def wrong_families() -> list[str]:
    """Families of docs/models.md that have no entry here, and entries without such a family."""
    families = set(_FAMILY.findall(MODELS.read_text("utf-8").partition("\n\nAll of them")[0])) - {"family"}
    return [f"{name!r} is in one of docs/models.md and {__file__} only" for name in sorted(families ^ TEMPLATES.keys())]


def syntax_of(path: Path) -> ReplySyntax:
    """What is found in a template."""
    return ChatTemplate(path.read_text("utf-8"), {"bos_token": "<s>", "eos_token": "</s>"}).reply_syntax


def table(find: Callable[[str], ReplySyntax]) -> str:
    """The table; `find` gives what is found in the template with a name."""
    rows = []
    for family, names in TEMPLATES.items():
        rows += [f"| {family} | {name} | {_calls(find(name))} | {_reasoning(find(name))} |\n" for name in names]
        rows += [] if names else [f"| {family} | {NO_CHATS.get(family, 'none is at hand')} | | |\n"]
    return HEAD + "".join(rows)


def _calls(found: ReplySyntax) -> str:
    tools = found.tools
    if tools is None:
        return "none"
    opening = tools.begin + tools.before_name + "NAME" + tools.before_arguments
    for placeholder in PLACEHOLDERS:
        opening = opening.replace(placeholder, placeholder.strip("\0"))
    return f"{found.name}: {_code(opening)}"


def _reasoning(found: ReplySyntax) -> str:
    return "none" if found.reasoning is None else f"{_code(found.reasoning.start)} {_code(found.reasoning.end)}"


def _code(text: str) -> str:
    """A text as code in a cell of a table."""
    fence = "`" * (1 + max(map(len, re.findall("`*", text))))
    return fence + text.replace("\0", "").replace("\n", "⏎").replace("|", "\\|").strip() + fence


if __name__ == "__main__":
    sys.exit(main())
