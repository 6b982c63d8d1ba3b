"""Structural tags in the formats of vLLM and XGrammar: text with tags whose content has a format of its own.

The grammar of a whole reply is written in them, too (`quire.text.reply_grammar`). A tag's `begin`, `end` and so on are
text, in which the text of a special token stands for that token.

    {"type": "structural_tag", "format": F}     where F is one of
    {"type": "const_string", "value": "..."}
    {"type": "json_schema", "json_schema": {...}}
    {"type": "regex", "pattern": "..."}
    {"type": "grammar", "grammar": "..."}       Lark or GBNF
    {"type": "any_text"}                        up to what follows: a text, a tag, or the end of the enclosing tag or
                                                of the reply
    {"type": "sequence", "elements": [F, ...]}  and {"type": "or", "elements": [F, ...]}
    {"type": "optional", "content": F}          and "star", "plus"; "repeat" with "min" and "max" (-1: no limit)
    {"type": "tag", "begin": "...", "content": F, "end": "..."}     or a list of possible ends
    {"type": "triggered_tags", "triggers": ["..."], "tags": [tag, ...]}
    {"type": "tags_with_separator", "tags": [tag, ...], "separator": "..."}

The last two may have "at_least_one" and "stop_after_first", true or false: with "at_least_one" there is no text before
the first tag. `any_text` and `triggered_tags` may have "excludes", texts that do not occur in the free text. The older
format, `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, is accepted, too. Other fields and types of
vLLM and XGrammar are refused by name. Quire adds three fields: `then` of triggered tags is what follows the only tag
(with `stop_after_first`); `not_first` of text lists markers with which it does not begin, even after white space, and
`unlike` of `any_text` is a regular expression of such beginnings. And what stands in several places is written once,
beside "format": `"rules": {"NAME": F}`, and `{"type": "rule", "name": "NAME"}` in each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.errors import SamplingParamsError
from quire.grammar.json_schema import enforced_schema

MAX_DEPTH = 64
MAX_FORMATS = 20_000
MAX_TIMES = 10_000
"""Most repetitions of `repeat`."""

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
    "rule": {"name": str},
    "any_text": {"excludes": list, "not_first": list, "unlike": str},
    "sequence": {"elements": list},
    "or": {"elements": list},
    "optional": {"content": dict},
    "star": {"content": dict},
    "plus": {"content": dict},
    "repeat": {"min": int, "max": int, "content": dict},
    "tag": {"begin": str, "content": dict, "end": (str, list)},
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
        *("at_least_one", "stop_after_first", "then", "excludes", "not_first", "unlike"),
        *("style", "whitespace_pattern", "disable_any_whitespace"),
    }
)
_NOTHING: dict[str, dict[str, Any]] = {
    "json_schema": {"any_order": False, "max_whitespace_cnt": None, "excludes": []},
    "any_text": {"max_tokens": None, "max_chars": None},
}
"""Fields that are refused except with these values, which have no effect and are written by XGrammar's classes."""


def structural_tag_grammars(
    text: str,
    specials: Mapping[str, int],
    whitespace: str,
    grammar: Callable[[str], str],
    markers: Mapping[str, int] | None = None,
) -> str:
    """Translate a structural tag into the library's language.

    Args:
        specials: special tokens by their text.
        markers: other added tokens by their text. A text that must come has them as these tokens: where several such
            texts may come, the library would have what they share spelled in other tokens.
        whitespace: a regular expression for white space in JSON.
        grammar: converts a grammar in Lark or GBNF to Lark.

    Raises:
        SamplingParamsError: it is not valid.
    """
    root, named_formats = _root(text)
    lark = _Lark(specials, whitespace, grammar, named_formats, markers or {})
    start = lark.format(root, "", 0)
    rules = "\n".join([f"start: {start or EMPTY}", *lark.rules])
    if not lark.grammars:
        return rules
    named = [{"name": name, "lark_grammar": source} for name, source in lark.grammars.items()]
    return json.dumps({"grammars": [{"lark_grammar": rules}, *named]})


def root_format(text: str) -> Any:
    """The format of a client's structural tag in either spelling; its contents are not checked.

    Raises:
        SamplingParamsError: it is not a structural tag.
    """
    found, rules = _root(text)
    if rules:
        raise SamplingParamsError("a structural tag has the unknown field 'rules'")
    return found


def _root(text: str) -> tuple[Any, dict[str, Any]]:
    """A structural tag's format, and its rules."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SamplingParamsError(f"the structural tag is not valid JSON: {error}") from None
    fields = next(({name} for name in ("format", "structures") if isinstance(told, dict) and name in told), set())
    if not fields or told.get("type", "structural_tag") != "structural_tag":
        raise SamplingParamsError('a structural tag must be {"type": "structural_tag", "format": {...}}')
    if unknown := told.keys() - fields - {"type", *(["triggers"] if "structures" in fields else ["rules"])}:
        raise SamplingParamsError(f"a structural tag has the unknown field {sorted(unknown)[0][:80]!r}")
    if "format" in fields:
        rules = told.get("rules", {})
        if not isinstance(rules, dict):
            raise _refused(".rules", "must be an object of formats")
        return told["format"], rules
    if not isinstance(told["structures"], list):
        raise _refused(".structures", "must be a list")
    tags = [_old_tag(each, f".structures[{index}]") for index, each in enumerate(told["structures"])]
    return {"type": "triggered_tags", "triggers": told.get("triggers"), "tags": tags}, {}


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
    """Collects the rules of a grammar in Lark; a format becomes an expression for use in a rule."""

    def __init__(
        self,
        specials: Mapping[str, int],
        whitespace: str,
        grammar: Callable[[str], str],
        named_formats: Mapping[str, Any],
        markers: Mapping[str, int],
    ) -> None:
        self.rules: list[str] = []
        self.grammars: dict[str, str] = {}
        self._whitespace, self._grammar, self._specials = whitespace, grammar, specials
        self._tokens = {**markers, **specials}
        self._special, self._token = _any_of(specials), _any_of(self._tokens)
        self._formats = 0
        self._named_formats = named_formats
        self._named: dict[str, str] = {}  # the rules of those that were written

    def format(self, given: Any, where: str, depth: int, ends: Sequence[str] = ()) -> str:
        """The expression of a format, including one of the `ends` of the tag whose content it is."""
        self._formats += 1
        if depth > MAX_DEPTH or self._formats > MAX_FORMATS:
            raise SamplingParamsError(f"a structural tag has at most {MAX_DEPTH} levels and {MAX_FORMATS} formats")
        kind = _checked(given, where)
        match kind:
            case "any_text":
                return self._until(ends, given)
            case "regex":
                return self._regex(given["pattern"], ends)
            case "sequence":
                return self._sequence(given["elements"], where, depth + 1, ends)
            case "or":
                options = enumerate(given["elements"])
                return self._either([self.format(one, f"{where}.elements[{i}]", depth + 1, ends) for i, one in options])
            case "tag":
                content = self.format(given["content"], f"{where}.content", depth + 1, _ends(given))
                return self._join(self._literal(given["begin"]), content, self._one_of(ends))
            case "triggered_tags":
                return self._triggered(given, where, depth + 1, ends)
            case _:
                return self._join(self._whole(kind, given, where, depth + 1), self._one_of(ends))

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
            case "rule":
                return self._rule_named(given["name"], where, depth)
            case "tags_with_separator":
                return self._separated(given, where, depth)
            case "optional" | "star" | "plus" | "repeat":
                content = self._rule(self.format(given["content"], f"{where}.content", depth))
                return content + {"optional": "?", "star": "*", "plus": "+"}.get(kind, _times(given))
            case _:
                raise RuntimeError(f"no way to write {kind}")

    def _sequence(self, elements: Sequence[Any], where: str, depth: int, ends: Sequence[str]) -> str:
        """A sequence of formats; free text ends at the text with which the next format begins."""
        parts, left = [], [*elements]
        while left:
            place = f"{where}.elements[{len(elements) - len(left)}]"
            element, up_to = left.pop(0), [] if left else ends
            if left and _checked(element, place) in ("any_text", "triggered_tags"):
                begin, left[0] = _head(left[0], place)
                up_to = [begin]
            parts.append(self.format(element, place, depth, up_to))
        return self._join(*(parts or [self._one_of(ends)]))

    def _rule_named(self, name: str, where: str, depth: int) -> str:
        if name not in self._named:
            if name not in self._named_formats:
                raise _refused(where, f"names the rule {name[:80]!r}, which is not there")
            self._named[name] = ""
            self._named[name] = self._rule(self.format(self._named_formats[name], f".rules.{name}", depth))
        if not self._named[name]:
            raise _refused(where, f"leads from the rule {name[:80]!r} back to itself")
        return self._named[name]

    # -- tags ------------------------------------------------------------------------------------------------------

    def _triggered(self, given: Format, where: str, depth: int, ends: Sequence[str]) -> str:
        triggers, tags = given["triggers"], given["tags"]
        if not triggers or not all(isinstance(one, str) and one for one in triggers):
            raise _refused(f"{where}.triggers", "must be a list of texts that are not empty")
        if not tags:
            raise _refused(f"{where}.tags", "is empty")
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
        rules = {trigger: self._rule(self._either(body)) for trigger, body in bodies.items() if body}

        def one_tag(text: Format) -> str:
            return self._either([self._join(self._until([one], text), rule) for one, rule in rules.items()])

        later = {"excludes": given.get("excludes", [])}
        if given.get("at_least_one"):
            first, none = self._either([self._join(self._literal(one), rule) for one, rule in rules.items()]), []
        else:
            first, none = one_tag(given), [self._until(ends, given)]
        if given.get("stop_after_first"):
            then = self.format(given["then"], f"{where}.then", depth) if "then" in given else ""
            return self._either([self._join(first, then, self._one_of(ends)), *none])
        return self._either([self._join(first, f"{self._rule(one_tag(later))}*", self._until(ends, later)), *none])

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

    def _until(self, ends: Sequence[str], given: Format) -> str:
        """Any text up to and including the first occurrence of one of `ends`; without ends, the rest of the reply.
        `given` has `excludes`, `not_first` and `unlike`."""
        unlike = [given["unlike"]] if given.get("unlike") else []
        nots = [*_without("\\s*", self._firsts(given.get("not_first", ())), unlike)]
        nots += _without(".*", self._firsts(given.get("excludes", ())))
        return self._up_to(" & ".join([TEXT, *nots]), ends)

    def _regex(self, pattern: str, ends: Sequence[str]) -> str:
        """Text that matches a regular expression and does not contain the beginning of an end, and one of `ends`."""
        return self._up_to(" & ".join([_slashed(pattern), *_without(".*", self._firsts(ends))]), ends)

    def _firsts(self, texts: Sequence[str]) -> list[str]:
        """The plain text with which each of these begins, if it does."""
        firsts = [parts[0] for text in texts if (parts := self._parts(text))]
        return [one for one in firsts if isinstance(one, str)]

    def _up_to(self, text: str, ends: Sequence[str]) -> str:
        """Text that matches an expression of terminals, up to and including the first occurrence of one of `ends`.

        The rule is lazy, since the library does not backtrack: an end such as a line between two line breaks may begin
        again where it ends, and then further characters might belong to a second one.
        """
        return self._either([self._up_to_one(text, end) for end in ends]) if ends else self._terminal(text)

    def _up_to_one(self, text: str, end: str) -> str:
        parts = self._parts(end)
        if not parts or isinstance(parts[0], int):
            return self._join(self._terminal(text), self._literal(end))
        first, rest = parts[0], end[len(parts[0]) :]
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {self._terminal(f'({text}) {_quoted(first)}')}")
        return self._join(name, self._literal(rest))

    def _json(self, given: Format) -> str:
        spaces: dict[str, Any] = {"whitespace_pattern": given.get("whitespace_pattern", self._whitespace)}
        if given.get("disable_any_whitespace"):
            spaces = {"whitespace_flexible": False}
        return "%json " + enforced_schema(json.dumps(given["json_schema"]), spaces)

    def _one_of(self, texts: Sequence[str]) -> str:
        return self._either([self._literal(text) for text in texts]) if texts else ""

    def _literal(self, text: str) -> str:
        parts = self._parts(text, self._token)
        return " ".join(f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in parts)

    def _parts(self, text: str, tokens: re.Pattern[str] | None = None) -> list[str | int]:
        """Split a text into plain parts and ids of special tokens, or of all `tokens`."""
        parts: list[str | int] = []
        at = 0
        for found in (tokens or self._special).finditer(text):
            parts += [text[at : found.start()], self._tokens[found[0]]]
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
        """Add a rule; returns its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {expression or EMPTY}")
        return name

    def _terminal(self, expression: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """The longest of these texts."""
    names = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) if names else r"(?!)")


def _checked(given: Any, where: str) -> str:
    """Check the fields of a format; returns its type."""
    if not isinstance(given, dict):
        raise _refused(where, "must be an object with a type")
    kind = given.get("type", "tag" if "begin" in given else None)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise _refused(where, f"has the type {str(kind)[:80]!r}; it must be one of {', '.join(_FIELDS)}")
    fields = _FIELDS[kind]
    nothing = _NOTHING.get(kind, {})
    for name, value in given.items():
        if name in nothing and value == nothing[name] and type(value) is type(nothing[name]):
            continue
        if name != "type" and (name not in fields or not isinstance(value, fields[name])):
            raise _refused(where, f"has {str(name)[:80]!r}, which {kind} does not have, or not with such a value")
    for name in fields.keys() - given.keys() - _MAY_LACK:
        raise _refused(where, f"lacks {name!r}")
    for name in ("excludes", "not_first"):
        if not all(isinstance(one, str) and one for one in given.get(name, ())):
            raise _refused(f"{where}.{name}", "must be a list of texts that are not empty")
    ends = given["end"] if kind == "tag" else ""
    if isinstance(ends, list) and not (ends and all(isinstance(one, str) and one for one in ends)):
        raise _refused(f"{where}.end", "must be a text, or a list of texts that are not empty")
    if kind == "repeat":
        _check_times(given["min"], given["max"], where)
    if given.get("style", "json") != "json":
        raise _refused(where, f"has the style {given['style'][:80]!r}; only JSON is written here")
    return kind


def _ends(tag: Format) -> list[str]:
    """The ends of a tag; empty if it ends with its content."""
    end = tag["end"]
    return [*end] if isinstance(end, list) else [end] if end else []


def _check_times(least: Any, most: Any, where: str) -> None:
    if isinstance(least, bool) or not 0 <= least <= MAX_TIMES:
        raise _refused(where, f"has min {least}; it must be from 0 to {MAX_TIMES}")
    if isinstance(most, bool) or (most != -1 and not max(1, least) <= most <= MAX_TIMES):
        raise _refused(where, f"has max {most}; it must be -1, or from {max(1, least)} to {MAX_TIMES}")


def _times(repeat: Format) -> str:
    """The number of repetitions, in Lark."""
    least, most = repeat.get("min", 0), repeat.get("max", 0)
    return f"{{{least},{most if most >= 0 else ''}}}"


def _head(given: Any, after: str) -> tuple[str, Format]:
    """Split a format into the text with which it begins, and a format of the rest."""
    kind = given.get("type", "tag" if "begin" in given else None) if isinstance(given, dict) else None
    match kind:
        case "const_string" if isinstance(given.get("value"), str) and given["value"]:
            return given["value"], {**given, "value": ""}
        case "tag" if isinstance(given.get("begin"), str) and given["begin"]:
            return given["begin"], {**given, "begin": ""}
        case "sequence" if isinstance(given.get("elements"), list) and given["elements"]:
            begin, rest = _head(given["elements"][0], after)
            return begin, {**given, "elements": [rest, *given["elements"][1:]]}
        case _:
            raise _refused(
                after, "is free text, after which must come a const_string or a tag, so that its end is seen"
            )


def _refused(where: str, what: str) -> SamplingParamsError:
    return SamplingParamsError(f"the structural tag's format{where[:200]} {what}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without(before: str, texts: Sequence[str], patterns: Sequence[str] = ()) -> list[str]:
    """A terminal, if there are any texts or patterns: text that has none of them after `before`. It is a single
    expression, since the library may take very long to intersect several.
    """
    none = "|".join([*map(literal_pattern, texts), *patterns])
    return [f"~/(?s:{before}(?:{none}).*)/"] if none else []


def literal_pattern(text: str) -> str:
    """A regular expression that matches only this text."""
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)


def _slashed(pattern: str) -> str:
    """A regular expression as a terminal in Lark."""
    return "/(?:" + re.sub(r"\\.|/|\n", lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), pattern) + ")/"
