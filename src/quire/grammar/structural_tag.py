"""Structural tags, as vLLM and XGrammar spell them: text with tags whose content is of a form of its own.

The grammar of a whole reply is written in them, too (`quire.text.reply_grammar`). A tag's `begin`, `end` and the like
are text; where they hold the text of a special token, that token stands there.

    {"type": "structural_tag", "format": F}     where F is one of
    {"type": "const_string", "value": "..."}
    {"type": "json_schema", "json_schema": {...}}
    {"type": "regex", "pattern": "..."}
    {"type": "grammar", "grammar": "..."}       Lark or GBNF
    {"type": "any_text"}                        up to the end of the tag that it stands in, or of the reply
    {"type": "sequence", "elements": [F, ...]}  and {"type": "or", "elements": [F, ...]}
    {"type": "optional", "content": F}          and "star", "plus"
    {"type": "tag", "begin": "...", "content": F, "end": "..."}
    {"type": "triggered_tags", "triggers": ["..."], "tags": [tag, ...]}
    {"type": "tags_with_separator", "tags": [tag, ...], "separator": "..."}

The last two may have "at_least_one" and "stop_after_first", true or false; `any_text` and `triggered_tags` may have
"excludes", texts that do not come in the free text. The older spelling, `{"structures": [{"begin", "schema", "end"}],
"triggers": [...]}`, is taken, too. Whatever else others have is refused by name. Of Quire's own: `then` of triggered
tags, what follows the only tag (with `stop_after_first`); and `not_first` of text, markers with which it does not
begin, whatever white space is before them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import SamplingParamsError
from quire.grammar.json_schema import check_schema

MAX_DEPTH = 64
MAX_FORMATS = 20_000

Format = Mapping[str, Any]

_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "const_string": {"value": str},
    "json_schema": {
        "json_schema": (dict, bool),
        "style": str,
        "whitespace_pattern": str,
        "disable_any_whitespace": bool,
    },
    "regex": {"pattern": str},
    "grammar": {"grammar": str},
    "any_text": {"excludes": list, "not_first": list},
    "sequence": {"elements": list},
    "or": {"elements": list},
    "optional": {"content": dict},
    "star": {"content": dict},
    "plus": {"content": dict},
    "tag": {"begin": str, "content": dict, "end": str},
    "triggered_tags": {
        "triggers": list,
        "tags": list,
        "at_least_one": bool,
        "stop_after_first": bool,
        "then": dict,
        "excludes": list,
        "not_first": list,
    },
    "tags_with_separator": {"tags": list, "separator": str, "at_least_one": bool, "stop_after_first": bool},
}
_MAY_LACK = frozenset(
    {
        *("at_least_one", "stop_after_first", "then", "excludes", "not_first"),
        *("style", "whitespace_pattern", "disable_any_whitespace"),
    }
)


def structural_tag_grammars(
    text: str,
    specials: Mapping[str, int],
    whitespace: str,
    grammar: Callable[[str], str],
) -> str:
    """A structural tag in the library's language.

    Args:
        specials: special tokens by their text.
        whitespace: of JSON, as a regular expression.
        grammar: from a grammar in Lark or GBNF to Lark.

    Raises:
        SamplingParamsError: it is not valid.
    """
    lark = _Lark(specials, whitespace, grammar)
    start = lark.format(root_format(text), "", 0)
    rules = "\n".join([f"start: {start or EMPTY}", *lark.rules])
    if not lark.grammars:
        return rules
    named = [{"name": name, "lark_grammar": source} for name, source in lark.grammars.items()]
    return json.dumps({"grammars": [{"lark_grammar": rules}, *named]})


def root_format(text: str) -> Any:
    """The format of a structural tag in either spelling; what is in it is not looked at.

    Raises:
        SamplingParamsError: it is no structural tag.
    """
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SamplingParamsError(f"the structural tag is not valid JSON: {error}") from None
    fields = next(({name} for name in ("format", "structures") if isinstance(told, dict) and name in told), set())
    if not fields or told.get("type", "structural_tag") != "structural_tag":
        raise SamplingParamsError('a structural tag must be {"type": "structural_tag", "format": {...}}')
    if unknown := told.keys() - fields - {"type", *(["triggers"] if "structures" in fields else [])}:
        raise SamplingParamsError(f"a structural tag has the unknown field {sorted(unknown)[0][:80]!r}")
    if "format" in fields:
        return told["format"]
    if not isinstance(told["structures"], list):
        raise _refused(".structures", "must be a list")
    tags = [_old_tag(each, f".structures[{index}]") for index, each in enumerate(told["structures"])]
    return {"type": "triggered_tags", "triggers": told.get("triggers"), "tags": tags}


def _old_tag(given: Any, where: str) -> Format:
    if not isinstance(given, dict) or not {"begin", "schema", "end"} >= given.keys() >= {"begin", "end"}:
        raise _refused(where, "must be an object with begin, schema and end")
    schema = given.get("schema", True)
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _refused(where, f"has a schema that is not valid JSON: {error}") from None
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": given["begin"], "content": content, "end": given["end"]}


EMPTY = '""'
TEXT = "/(?s:.*)/"


class _Lark:
    """Writes rules; a format becomes an expression that stands in one."""

    def __init__(self, specials: Mapping[str, int], whitespace: str, grammar: Callable[[str], str]) -> None:
        self.rules: list[str] = []
        self.grammars: dict[str, str] = {}
        self._whitespace, self._grammar, self._specials = whitespace, grammar, specials
        names = sorted(filter(None, specials), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) if names else r"(?!)")
        self._formats = 0

    def format(self, given: Any, where: str, depth: int, end: str = "") -> str:
        """An expression of what the format says, with the `end` of the tag that it is the content of."""
        self._formats += 1
        if depth > MAX_DEPTH or self._formats > MAX_FORMATS:
            raise SamplingParamsError(f"a structural tag has at most {MAX_DEPTH} levels and {MAX_FORMATS} formats")
        kind = _checked(given, where)
        if kind == "any_text":
            return self._until(end, given)
        if kind == "regex":
            return self._regex(given["pattern"], end)
        if kind in ("sequence", "or"):
            ends = [end if kind == "or" or each is given["elements"][-1] else "" for each in given["elements"]]
            parts = [
                self.format(each, f"{where}.elements[{index}]", depth + 1, last)
                for index, (each, last) in enumerate(zip(given["elements"], ends, strict=True))
            ]
            return self._either(parts) if kind == "or" else self._join(*(parts or [self._literal(end)]))
        if kind == "tag":
            content = self.format(given["content"], f"{where}.content", depth + 1, given["end"])
            return self._join(self._literal(given["begin"]), content, self._literal(end))
        return self._join(self._whole(kind, given, where, depth + 1), self._literal(end))

    def _whole(self, kind: str, given: Format, where: str, depth: int) -> str:
        match kind:
            case "const_string":
                return self._literal(given["value"])
            case "json_schema":
                return self._json(given)
            case "grammar":
                name = f"g{len(self.grammars)}"
                self.grammars[name] = self._grammar(given["grammar"])
                return f"@{name}"
            case "triggered_tags":
                return self._triggered(given, where, depth)
            case "tags_with_separator":
                return self._separated(given, where, depth)
            case "optional" | "star" | "plus":
                content = self._rule(self.format(given["content"], f"{where}.content", depth))
                return content + {"optional": "?", "star": "*", "plus": "+"}[kind]
            case _:
                raise RuntimeError(f"no way to write {kind}")

    # -- tags ------------------------------------------------------------------------------------------------------

    def _triggered(self, given: Format, where: str, depth: int) -> str:
        triggers, tags = given["triggers"], given["tags"]
        if not triggers or not all(isinstance(one, str) and one for one in triggers):
            raise _refused(f"{where}.triggers", "must be a list of texts that are not empty")
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, tag in enumerate(tags):
            place = f"{where}.tags[{index}]"
            if _checked(tag, place) != "tag":
                raise _refused(place, "must be a tag")
            trigger = next((one for one in triggers if tag["begin"].startswith(one)), None)
            if trigger is None:
                raise _refused(place, "begins with none of the triggers")
            body = {**tag, "begin": tag["begin"][len(trigger) :]}
            bodies[trigger].append(self.format(body, place, depth))
        if not tags:
            raise _refused(f"{where}.tags", "is empty")
        rules = {trigger: self._rule(self._either(body)) for trigger, body in bodies.items() if body}

        def one_tag(text: Format) -> str:
            return self._either([self._join(self._until(one, text), rule) for one, rule in rules.items()])

        later = {"excludes": given.get("excludes", [])}
        first, text = one_tag(given), self._until("", given)
        if given.get("stop_after_first"):
            then = self.format(given["then"], f"{where}.then", depth) if "then" in given else ""
            return self._either([self._join(first, then), *([] if given.get("at_least_one") else [text])])
        more = self._join(first, f"{self._rule(one_tag(later))}*", self._until("", later))
        return self._either([more, *([] if given.get("at_least_one") else [text])])

    def _separated(self, given: Format, where: str, depth: int) -> str:
        tags = [self.format(tag, f"{where}.tags[{i}]", depth) for i, tag in enumerate(given["tags"])]
        if not tags:
            raise _refused(f"{where}.tags", "is empty")
        tag = self._rule(self._either(tags))
        if not given.get("stop_after_first"):
            more = self._rule(self._join(self._literal(given["separator"]), tag))
            tag = self._rule(f"{tag} {more}*")
        return tag if given.get("at_least_one") else f"{tag}?"

    # -- text ------------------------------------------------------------------------------------------------------

    def _until(self, end: str, given: Format) -> str:
        """Any text up to where `end` stands for the first time, and that; with no end, the rest of the reply. `given`
        says what is not in it, and what it does not begin with."""
        guards = [("\\s*", marker) for marker in given.get("not_first", ())]
        guards += [(".*", text) for text in given.get("excludes", ())]
        parts = [(before, self._parts(marker)[0]) for before, marker in guards]
        nots = [f"~/(?s:{before}{_pattern(one)}.*)/" for before, one in parts if isinstance(one, str)]
        return self._up_to(" & ".join([TEXT, *nots]), end)

    def _regex(self, pattern: str, end: str) -> str:
        """What matches as a whole, and does not hold the text after it."""
        text, parts = _slashed(pattern), self._parts(end)
        if parts and isinstance(parts[0], str):
            text = f"{text} & ~/(?s:.*{_pattern(parts[0])}.*)/"
        return self._up_to(text, end)

    def _up_to(self, text: str, end: str) -> str:
        """What an expression of terminals matches, up to where `end` stands for the first time, and that.

        Lazy, since an end such as a line between two breaks may begin again where it ends, and the library does not
        go back to it once more characters could have been another one.
        """
        parts = self._parts(end)
        if not parts or isinstance(parts[0], int):
            return self._join(self._terminal(text), self._literal(end))
        first, rest = parts[0], end[len(parts[0]) :]
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {self._terminal(f'({text}) {_quoted(first)}')}")
        return self._join(name, self._literal(rest))

    def _json(self, given: Format) -> str:
        schema = given["json_schema"]
        check_schema(json.dumps(schema))
        spaces: dict[str, Any] = {"whitespace_pattern": given.get("whitespace_pattern", self._whitespace)}
        if given.get("disable_any_whitespace"):
            spaces = {"whitespace_flexible": False}
        return "%json " + json.dumps({**({} if schema is True else schema), "x-guidance": spaces})

    def _literal(self, text: str) -> str:
        return " ".join(f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in self._parts(text))

    def _parts(self, text: str) -> list[str | int]:
        """Text and special tokens, in turn."""
        parts: list[str | int] = []
        at = 0
        for found in self._special.finditer(text):
            parts += [text[at : found.start()], self._specials[found[0]]]
            at = found.end()
        return [part for part in [*parts, text[at:]] if part != ""]

    # -- Lark ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _join(*expressions: str) -> str:
        return " ".join(filter(None, expressions))

    def _either(self, options: Sequence[str]) -> str:
        if not options:
            raise SamplingParamsError("a structural tag has a choice of nothing")
        distinct = list(dict.fromkeys(option or EMPTY for option in options))
        return distinct[0] if len(distinct) == 1 else self._rule(" | ".join(distinct))

    def _rule(self, expression: str) -> str:
        """Its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {expression or EMPTY}")
        return name

    def _terminal(self, expression: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name


def _checked(given: Any, where: str) -> str:
    """The type of a format, whose fields are of the right types."""
    if not isinstance(given, dict):
        raise _refused(where, "must be an object with a type")
    kind = given.get("type", "tag" if "begin" in given else None)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise _refused(where, f"has the type {str(kind)[:80]!r}; it must be one of {', '.join(_FIELDS)}")
    fields = _FIELDS[kind]
    for name, value in given.items():
        if name != "type" and (name not in fields or not isinstance(value, fields[name])):
            raise _refused(where, f"has {str(name)[:80]!r}, which {kind} does not have, or not with such a value")
    for name in fields.keys() - given.keys() - _MAY_LACK:
        raise _refused(where, f"lacks {name!r}")
    for name in ("excludes", "not_first"):
        if not all(isinstance(one, str) and one for one in given.get(name, ())):
            raise _refused(f"{where}.{name}", "must be a list of texts that are not empty")
    if given.get("style", "json") != "json":
        raise _refused(where, f"has the style {given['style'][:80]!r}; only JSON is written here")
    return kind


def _refused(where: str, what: str) -> SamplingParamsError:
    return SamplingParamsError(f"the structural tag's format{where[:200]} {what}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """A regular expression of this text alone."""
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)


def _slashed(pattern: str) -> str:
    """As it stands between slashes in Lark."""
    return "/(?:" + re.sub(r"\\.|/|\n", lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), pattern) + ")/"
