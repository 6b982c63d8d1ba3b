r"""How a text is split into words before a GGUF file's byte-pair merges apply.

A GGUF file does not describe this: its `tokenizer.ggml.pre` is a name, given by llama.cpp's converter to every
tokenizer that splits one known text alike. What a name stands for is written here as the published `tokenizer.json`
of its family has it; llama.cpp's own patterns (`llama-vocab.cpp`) are rewritten for another regular expression engine,
and leave out the normalizer. A name that is not here is refused: a wrong split gives other tokens, silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
"""English endings, in either case; GPT-2's pattern knows them in lower case alone."""

PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> dict[str, Any]:
    """Text that matches is a word, and so is what lies between."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _words(letters: str, digits: str, rest: str = f"{PUNCTUATION}|{SPACES}") -> dict[str, Any]:
    """The pattern of GPT-4's `cl100k_base` and its kin."""
    return _split(f"{CONTRACTIONS}|{letters}|{digits}|{rest}")


def _cased_words(but: str, endings: str) -> str:
    """Words that end where an upper case letter follows a lower case one.

    Args:
        but: narrows the class of letters.
        endings: what may follow a word.
    """
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{endings}|{before}{upper}+{lower}*{endings}"


LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
LETTERS_AND_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
THREE_DIGITS, ONE_DIGIT = r"\p{N}{1,3}", r"\p{N}"

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
"""Each byte becomes a letter."""
GPT2 = {**BYTES, "use_regex": True}
"""The same, after a split by GPT-2's pattern."""
DIGITS = {"type": "Digits", "individual_digits": True}

CL100K = (_words(LETTERS, THREE_DIGITS), BYTES)
"""GPT-4's and Llama 3's."""
QWEN2 = (_words(LETTERS, ONE_DIGIT), BYTES)
QWEN35 = (_words(LETTERS_AND_MARKS, ONE_DIGIT, rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"), BYTES)
O200K = (_split(f"{_cased_words('', f'{CONTRACTIONS}?')}|{THREE_DIGITS}|{SLASHED}|{SPACES}"), BYTES)
"""GPT-4o's."""
TEKKEN = (_split(f"{_cased_words('', '')}|{ONE_DIGIT}|{SLASHED}|{SPACES}"), BYTES)
"""Mistral's, since Nemo."""

DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    "\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-"
    "\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-"
    "\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-"
    "\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with a case, of the scripts and the version of Unicode that DeepSeek's pattern lists."""
CJK = _split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
DEEPSEEK_V3 = (
    _split(THREE_DIGITS),
    _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    _split(
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        rf""" ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"""
    ),
    BYTES,
)


DEEPSEEK_LLM = (
    _split("[\r\n]"),
    _split(rf"\s?[{DEEPSEEK_LETTERS}]+"),
    _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    _split(r"\s+$"),
    CJK,
    DIGITS,
    BYTES,
)
DEEPSEEK_CODER = (_split("[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), CJK, DIGITS, BYTES)

# Han characters are words of their own; `&&` intersects classes, as in the pattern that Kimi's files have.
NOT_HAN = r"&&[^\p{Han}]"
KIMI = (
    _split(
        rf"[\p{{Han}}]+|{_cased_words(NOT_HAN, f'{CONTRACTIONS}?')}|{THREE_DIGITS}|{PUNCTUATION}|{SPACES}",
    ),
    BYTES,
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What one name of `tokenizer.ggml.pre` stands for.

    Attributes:
        steps: the pre-tokenizers, as in `tokenizer.json`; the last one makes letters of bytes.
        normal_form: of Unicode, into which the text is brought first; None: it stays as it is.
        whole_words: a word that is a token is that token, whatever the merges would make of it.
        add_bos: a text begins with the BOS token, where the file does not say whether it does.
    """

    steps: tuple[Mapping[str, Any], ...]
    normal_form: str | None = None
    whole_words: bool = False
    add_bos: bool = False


_RULES: Mapping[tuple[str, ...], PreTokenizer] = {
    ("gpt-2", "phi-2"): PreTokenizer((GPT2,)),
    ("mpt", "olmo"): PreTokenizer((GPT2,), "NFC"),  # GPT-NeoX's
    ("smollm", "starcoder", "refact"): PreTokenizer((DIGITS, GPT2)),
    ("command-r",): PreTokenizer((DIGITS, GPT2), "NFC"),
    ("exaone",): PreTokenizer((DIGITS, GPT2), "NFKC"),
    ("llama3", "llama-v3", "llama-bpe", "lfm2"): PreTokenizer(CL100K, whole_words=True, add_bos=True),
    ("chatglm-bpe", "glm4", "glm5"): PreTokenizer(CL100K, whole_words=True),
    ("dbrx",): PreTokenizer(CL100K),
    ("qwen2", "deepseek-r1-qwen"): PreTokenizer(QWEN2, "NFC"),
    ("qwen35",): PreTokenizer(QWEN35, "NFC"),
    ("gpt-4o", "llama4"): PreTokenizer(O200K, whole_words=True),
    ("minimax-m2",): PreTokenizer(O200K, "NFC"),
    ("tekken",): PreTokenizer(TEKKEN, whole_words=True, add_bos=True),
    ("kimi-k2",): PreTokenizer(KIMI, whole_words=True),
    ("deepseek-v3",): PreTokenizer(DEEPSEEK_V3),
    ("deepseek-llm",): PreTokenizer(DEEPSEEK_LLM),
    ("deepseek-coder",): PreTokenizer(DEEPSEEK_CODER),
}

PRE_TOKENIZERS = {name: rule for names, rule in _RULES.items() for name in names}
"""What each known name stands for."""
