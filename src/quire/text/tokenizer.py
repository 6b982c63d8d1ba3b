"""Text to token ids and back, over the `tokenizers` library and the files of a Hugging Face folder.

Special tokens in the messages of a chat are text: "<|im_end|>" there is encoded as characters and cannot end a
turn. Only two sources may produce a chat's control tokens: the tokenizer's post-processor (a BOS token), and the chat
template's own text. A raw prompt is a template's text already, so its special tokens are control tokens, unless the
caller says otherwise (`parse_special`).

A template can break that: one that changes user text (`content | replace(" ", "")`, `content | lower`) may turn
harmless text into the text of a control token, after the check here. Such a template's output is trusted, here as
elsewhere. The unknown token is not a control token: it may result from text that the vocabulary cannot represent.

The second needs care, since a template mixes its control tokens with user text: see `defusing.py`.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import (
    ChatTemplateError,
    PromptTooLongError,
    RequestError,
    SamplingParamsError,
    TokenizerError,
    TokenizerFailedError,
)
from quire.grammar.vocabulary import Vocabulary
from quire.models.fields import has_file
from quire.models.hub import TOKENIZER_FILE
from quire.text.chat_template import (
    AS_THE_CHECKPOINT,
    ChatOptions,
    ChatTemplate,
    Message,
    check_messages,
    load_templates,
    open_reasoning,
    plain_json,
)
from quire.text.defusing import defused, replacements
from quire.text.reply_grammar import ReplyRequest, reply_grammar
from quire.text.reply_syntax import PLAIN, ReplyForm, ReplySyntax
from quire.text.template_sandbox import SPECIAL_NAMES
from quire.text.tokenizer_backend import BYTE_OF, Backend

NO_TOKENIZER = (
    "the checkpoint has no tokenizer.json: prompts are token ids, and outputs have no text; chats are refused"
)
NO_CHATS = "chats are refused: "
PLAIN_TEXTS = ("a", "A", "0", ".")
"""Nearly every vocabulary contains one of these."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as given to the model.

    Attributes:
        text, token_ids: the prompt.
        reply: how to parse the reply.
        structured: its grammar; None if it is unconstrained.
        loosened: tools whose arguments may be any JSON object, and why: see `ReplyGrammar`.
        unused: variables that the template does not use, which were left out; each with the error that says so.
    """

    text: str
    token_ids: list[int]
    reply: ReplyForm = PLAIN
    structured: StructuredOutputsParams | None = None
    loosened: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to use from several threads.

    Args:
        source: content of `tokenizer.json`.
        config: content of `tokenizer_config.json`.
        templates: chat templates by name.
        name, template_name: names of the source and the templates in error messages.
        tool_format: how the model writes tool calls: see `EngineConfig.tool_format`.

    Raises:
        TokenizerError: the source is not valid, or not safe to use.

    Attributes:
        template_error: the error of a template that cannot be used: chats are refused with it. None if there is none.
    """

    def __init__(
        self,
        source: str,
        config: Mapping[str, Any] | None = None,
        templates: Mapping[str, str] | None = None,
        name: str = "tokenizer.json",
        template_name: str = "the chat template",
        tool_format: str = "auto",
    ) -> None:
        config = config or {}
        self._source, self._config, self._name = source, config, name
        self._text = self._build(special_is_text=True)
        model = _parse(source, name)["model"]
        self._text.check_decoding(model.get("vocab") or ())
        self._text.check_encoding()
        self._bytes_a_token = self._text.bytes_a_token(model)
        self._control: Backend | None = None
        self._lock = threading.Lock()
        self.special_ids = frozenset(self._text.special)
        self._special_texts = sorted(filter(None, self._text.special.values()))
        self.special_tokens = _special_tokens(config, name)
        self._unknown_id = self._find_unknown_id(model)
        self._control_ids = self.special_ids - {self._unknown_id}
        self.vocab_size = self._text.vocab_size
        self.template_error: ChatTemplateError | None = None
        self._templates: dict[str, ChatTemplate] = {}
        try:
            for key, text in (templates or {}).items():
                self._templates[key] = ChatTemplate(text, self.special_tokens, template_name, tool_format)
        except ChatTemplateError as error:
            self.template_error = error
        self.byte_ids = self._find_byte_ids()
        self._anchor = self._find_anchor()
        self._anchor_length = len(self.decode(self._anchor, skip_special_tokens=False))

    @classmethod
    def load(cls, folder: str | Path, chats: ChatOptions = AS_THE_CHECKPOINT) -> Tokenizer:
        """Load the tokenizer of a checkpoint. Raises `TokenizerError` or `ChatTemplateError`."""
        folder = Path(folder)
        path = folder / TOKENIZER_FILE
        if not has_file(path, TokenizerError):
            raise TokenizerError(
                f"{folder} has no tokenizer.json; save one there with transformers' save_pretrained, "
                "or use token ids without a tokenizer"
            )
        config: Any = {}
        config_path = folder / "tokenizer_config.json"
        if has_file(config_path, TokenizerError):
            config = _parse(_read(config_path), str(config_path))
        if not isinstance(config, dict):
            raise TokenizerError(f"{config_path} must hold an object")
        if chats.template is None:
            templates, origin = load_templates(folder, config)
            name = f"the chat template in {origin}"
        else:
            templates, name = {"default": chats.template}, "chat_template"
        return cls(_read(path), config, templates, str(path), name, chats.tool_format)

    @classmethod
    def load_if_present(cls, folder: str | Path, chats: ChatOptions = AS_THE_CHECKPOINT) -> Tokenizer | None:
        """The tokenizer of a checkpoint, or None if it has no `tokenizer.json`. Raises as `load` does."""
        there = has_file(Path(folder) / TOKENIZER_FILE, TokenizerError)
        return cls.load(folder, chats) if there else None

    def __repr__(self) -> str:
        template = "with a chat template" if self._templates else "without a chat template"
        if self.template_error is not None:
            template = "with a chat template that is not valid"
        return f"<Tokenizer {self._name!r}: {self.vocab_size:,} tokens, {template}>"

    @property
    def no_chats(self) -> str:
        """Why chats are refused although there is a template; "" if they are not."""
        return "" if self.template_error is None else f"{NO_CHATS}{self.template_error}"

    def refuse_chats(self, why: str) -> None:
        """Do not use the template, since it was found to be unusable elsewhere; `why` may be a `no_chats`."""
        self.template_error = self.template_error or ChatTemplateError(why.removeprefix(NO_CHATS))

    @property
    def reply_syntax(self) -> ReplySyntax:
        """The syntax of the model's replies."""
        if self.template_error is not None:
            return ReplySyntax(no_chats=self.no_chats)
        return self._template(with_tools=True).reply_syntax if self._templates else ReplySyntax()

    # --- text to ids --------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of a text. Raises `RequestError` for text that is not valid Unicode.

        Args:
            add_special_tokens: add those of the post-processor (such as BOS).
            parse_special: see `encode_batch`.
        """
        return self.encode_batch([text], add_special_tokens, parse_special=parse_special)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        parse_special: bool = False,
    ) -> list[list[int]]:
        """The ids of many texts, in parallel and without holding the GIL.

        Args:
            parse_special: the text of a special token becomes that token, as in `transformers`; otherwise it is text.
            max_tokens: refuse a text that certainly has more tokens, without encoding it; None: encode all.

        Raises:
            RequestError: a text is not valid Unicode. PromptTooLongError: see `max_tokens`.
        """
        for index, text in enumerate(texts):
            self._check_fits(check_text(text, index if len(texts) > 1 else None), max_tokens)
        if parse_special:
            return [encoding.ids for encoding in self._controls().encode_batch(list(texts), add_special_tokens)]
        encoded = self._text.encode_batch(list(texts), add_special_tokens)
        return [self._checked(text, encoding) for text, encoding in zip(texts, encoded, strict=True)]

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences of bad words: each alone, and after a space."""
        found = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = self.encode(text, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found

    def _checked(self, text: str, encoding: Any) -> list[int]:
        """The ids of an encoding; the text is encoded again in pieces if it still became a special token.

        That happens if a special token is also in the model's own vocabulary.
        """
        ids: list[int] = encoding.ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # The mask tells the post-processor's tokens from those of the text.
        mask = encoding.special_tokens_mask
        if all(made for token, made in zip(ids, mask, strict=True) if token in self._control_ids):
            return ids
        before = ids[: mask.index(0)]
        after = ids[len(mask) - mask[::-1].index(0) :]
        return [*before, *self._encode_broken(text), *after]

    def _check_fits(self, size: int, max_tokens: int | None) -> None:
        """Refuse a text of this many bytes if it certainly has more tokens than these. Raises PromptTooLongError."""
        if max_tokens is None or self._bytes_a_token is None or size <= max_tokens * self._bytes_a_token:
            return
        raise PromptTooLongError(  # the first sentence is OpenAI's, which clients look for
            f"This model's maximum context length is {max_tokens} tokens. However, the prompt has {size} bytes, of "
            f"which a token stands for {self._bytes_a_token:g} at most; shorten the prompt, or raise max_model_len",
            param="prompt",
        )

    def _encode_broken(self, text: str) -> list[int]:
        """Encode text that would yield special tokens in pieces, split inside each of them."""
        ids: list[int] = []
        pieces = [text]  # a stack: the next piece is the last
        while pieces:
            piece = pieces.pop()
            encoding = self._text.encode(piece)
            cuts = []
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
                if token in self._control_ids:
                    if end - start < 2:
                        raise RequestError(f"the text {piece[start:end]!r} cannot be told from a special token")
                    cuts.append(start + 1)
            if cuts:
                borders = [0, *cuts, len(piece)]
                pieces += reversed([piece[a:b] for a, b in itertools.pairwise(borders)])
            else:
                ids += encoding.ids
        return ids

    # --- ids to text --------------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Unknown ids (of a padded vocabulary) have no text."""
        return self._text.decode(list(token_ids), skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of a token after another one: a leading space is kept.

        Part of a multi-byte character becomes the replacement character.
        """
        if token_id in self.special_ids or not self._anchor:
            return self.decode([token_id], skip_special_tokens=False)
        return self.decode([*self._anchor, token_id], skip_special_tokens=False)[self._anchor_length :]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, which may be part of a character."""
        return self._token_bytes(token_id, BYTE_OF if self._text.spells_bytes else {})

    def vocabulary(self, size: int) -> Vocabulary:
        """The bytes of each of a model's `size` ids, which may be part of a character.

        Raises:
            SamplingParamsError: a token's text depends on adjacent tokens.
        """
        if by := self._text.spaced_by:
            raise SamplingParamsError(
                "structured_outputs and thinking_token_budget need tokens that add the same text wherever they stand, "
                f"and this checkpoint's {TOKENIZER_FILE} {by}; leave them out"
            )
        spelled = BYTE_OF if self._text.spells_bytes else {}
        tokens = [self._token_bytes(token, spelled) for token in range(size)]
        special = [token for token in sorted(self.special_ids) if token < size]
        added = [token for token in sorted(self._text.added) if token < size]
        return Vocabulary(tokens, special, lambda text: self.encode(text, add_special_tokens=False), added)

    def _token_bytes(self, token: int, spelled: Mapping[str, int]) -> bytes:
        name = self._text.id_to_token(token)
        if name is None:
            return b""
        if token in self._text.added:
            return name.encode()
        if token in self.byte_ids:
            return bytes([int(name[3:5], 16)])
        if spelled and spelled.keys() >= set(name):
            return bytes(spelled[letter] for letter in name)
        return self.token_text(token).encode()

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the special tokens."""
        return tuple(self._special_texts)

    def special_tokens_named(self, texts: Collection[str]) -> dict[int, str]:
        """The special tokens with these texts, by id."""
        return {token: text for token, text in self._text.special.items() if text in texts} if texts else {}

    @property
    def anchor(self) -> list[int]:
        """Ids of some plain text, to decode others after; empty if there are none."""
        return list(self._anchor)

    def knows(self, token_id: int) -> bool:
        """Whether the id has a text."""
        return self._text.id_to_token(token_id) is not None

    @property
    def eos_token_id(self) -> int | None:
        """The id of the tokenizer's own end-of-sequence token; the model's configuration may name more."""
        return self._id_of("eos_token")

    # --- chats --------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Create what the first prompt would otherwise wait for."""
        self._controls()

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        reply: ReplyRequest | None = None,
        variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> RenderedChat:
        """Render messages with the checkpoint's template and encode them.

        The arguments are those of `ChatTemplate.render`, and `max_tokens` of `encode_batch`; the tools are those of
        `reply`. Special tokens in messages, tools and variables are text. Variables that the template does not use are
        left out, and named in the result.

        Raises:
            ChatTemplateError: the template is missing, or does not take these messages, tools or variables.
            PromptTooLongError: the prompt certainly has more than `max_tokens`.
            SamplingParamsError: see `reply_grammar`.
        """
        wanted = reply or ReplyRequest()
        tools = wanted.tools if wanted.tool_choice != "none" else []
        template = self._template(bool(tools))
        checked = check_messages(messages)
        if continue_final_message:
            checked[-1] = template.reopened(checked[-1])
        known, unused = template.known_variables(plain_json(dict(variables or {}), "the template's variables"))
        given: dict[str, Any] = {
            "messages": template.as_known(checked),
            "tools": plain_json(tools, "tools") or None,
            "variables": known,
        }
        replaced = replacements(given, template.source, self._special_texts)
        safe = defused(given, self._special_texts, replaced) if replaced else given
        text = template.render(
            safe["messages"],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=safe["tools"],
            variables=safe["variables"],
        )
        back = str.maketrans({private: first for first, private in replaced.items()})
        shown = text.translate(back) if replaced else text
        self._check_fits(check_text(shown), max_tokens)
        form = _reply_form(template, text)
        if continue_final_message:
            within = bool(open_reasoning(checked[-1])) and form.syntax.reasoning is not None
            form = msgspec.structs.replace(form, continues=True, in_reasoning=form.in_reasoning or within)
        grammar = reply_grammar(form, wanted)
        made = grammar.form, grammar.structured, grammar.loosened, unused
        if not replaced:
            ids: list[int] = self._controls().encode_batch([text], add_special_tokens=False)[0].ids
            return RenderedChat(shown, ids, *made)
        return RenderedChat(shown, self._encode_defused(text, back), *made)

    def _encode_defused(self, text: str, back: dict[int, str]) -> list[int]:
        """Encode a rendered chat: its control tokens are kept, everything between them is plain text."""
        encoding = self._controls().encode(text)
        ids: list[int] = []
        done = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # An unknown token stands for text, unless the text names it.
            spelled = token in self._control_ids or text[start:end] in self._special_texts
            if token in self.special_ids and spelled and end > start:
                ids += self.encode(text[done:start].translate(back), add_special_tokens=False)
                ids.append(token)
                done = end
        return ids + self.encode(text[done:].translate(back), add_special_tokens=False)

    def _template(self, with_tools: bool) -> ChatTemplate:
        if self.template_error is not None:
            raise ChatTemplateError(str(self.template_error)) from self.template_error
        if not self._templates:
            raise ChatTemplateError(
                f"{self._name} has no chat template; render the prompt yourself, or add chat_template.jinja"
            )
        template = self._templates.get("tool_use") if with_tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise ChatTemplateError(
                f"{self._name} has no chat template named 'default', only {', '.join(self._templates)}"
            )
        return template

    # --- loading ------------------------------------------------------------------------------------------

    def _build(self, special_is_text: bool) -> Backend:
        return Backend(self._source, self._name, self._config.get("added_tokens_decoder"), special_is_text)

    def _controls(self) -> Backend:
        """A second tokenizer in which special tokens are active, since switching a shared one would be a race."""
        with self._lock:
            if self._control is None:
                self._control = self._build(special_is_text=False)
            return self._control

    def _find_byte_ids(self) -> frozenset[int]:
        """Ids of single bytes (<0x0A>), if the decoder joins runs of them into characters."""
        if "ByteFallback" not in json.dumps(self._text.decoder):
            return frozenset()
        ids = (self._text.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token for token in ids if token is not None)

    def _find_unknown_id(self, model: Mapping[str, Any]) -> int | None:
        """The id of unknown text, unless that token is also BOS, EOS or the like."""
        found = model.get("unk_id")
        token = found if type(found) is int else None
        if isinstance(model.get("unk_token"), str):
            token = self._text.token_to_id(model["unk_token"])
        others = {self._id_of(name) for name in SPECIAL_NAMES if name not in ("unk_token", "pad_token")}
        return None if token in others else token

    def _find_anchor(self) -> list[int]:
        """Ids of some plain text; empty if none survives decoding. Raises TokenizerError if all of it fails."""
        failure: TokenizerFailedError | None = None
        for text in PLAIN_TEXTS:
            try:
                ids: list[int] = self._text.encode(text).ids
                self._text.encode_batch([text], add_special_tokens=True)
                if ids and self._text.decode(ids, skip_special_tokens=False).strip() == text:
                    return ids
            except TokenizerFailedError as error:
                failure = error
        if failure is not None:
            raise TokenizerError(
                f"{self._name} fails on plain text such as 'a' ({failure}); download it again, or use another one"
            ) from failure
        return []

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._text.token_to_id(text)


def _reply_form(template: ChatTemplate, prompt: str) -> ReplyForm:
    """How to parse the reply to a prompt."""
    syntax, prompt = template.reply_syntax, prompt.rstrip()
    if syntax.reasoning is None:
        return ReplyForm(syntax)
    starts, ends = prompt.endswith(syntax.reasoning.start), prompt.endswith(syntax.reasoning.end)
    return ReplyForm(syntax, in_reasoning=starts, reasoned=ends and syntax.content is None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _parse(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{name} is not valid JSON: {error}") from error


def check_text(text: str, index: int | None = None) -> int:
    """The text's length in bytes of UTF-8.

    Raises `RequestError` for anything but valid Unicode; `index` is the text's place in a list of several.
    """
    if not isinstance(text, str):
        raise RequestError(f"the text is a {type(text).__name__}; it must be a string")
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        where = "" if index is None else f"text {index}: "
        raise RequestError(
            f"{where}character {error.start} is half of a surrogate pair ({text[error.start]!r}); "
            "text must be valid Unicode"
        ) from error


def _special_tokens(config: Mapping[str, Any], name: str) -> dict[str, str]:
    """`bos_token` and the like by name; each is a string or an object with `content`.

    Raises `TokenizerError` for one that is not valid Unicode.
    """
    found = {}
    for key in SPECIAL_NAMES:
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            try:
                check_text(value)
            except RequestError as error:
                raise TokenizerError(
                    f"tokenizer_config.json beside {name}: {key} is not valid: {error}; correct it, or remove it"
                ) from error
            found[key] = value
    return found
