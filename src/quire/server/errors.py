"""Errors as responses, in OpenAI's format.

Clients get a stable code and a text of our own, without paths, addresses or messages of libraries. Those stay in the
log, under the request's id.
"""

from __future__ import annotations

from typing import Any

from quire.errors import (
    ChatTemplateError,
    EmptyPromptError,
    EngineClosedError,
    PromptTooLongError,
    QuireError,
    RequestError,
    RequestTooLargeError,
    SamplingParamsError,
    TokenizerTimeoutError,
    TokenizerUnavailableError,
    TokenOutOfRangeError,
    UnknownTemplateVariableError,
)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
"""`error.type` by HTTP status; any other status below 500 is "invalid_request_error", any above "server_error"."""

ANTHROPIC = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The same there; any other status below 500 is "invalid_request_error", any above "api_error"."""

INTERNAL_ERROR = "the server failed on this request; its log has the details, under the request's id"

CODES: dict[type[QuireError], str] = {
    PromptTooLongError: "context_length_exceeded",
    EmptyPromptError: "empty_prompt",
    TokenOutOfRangeError: "token_out_of_range",
    RequestTooLargeError: "request_too_large",
    SamplingParamsError: "invalid_value",
    UnknownTemplateVariableError: "unknown_template_variable",
    ChatTemplateError: "chat_template_error",
    TokenizerTimeoutError: "tokenizer_timeout",
}
"""`error.code` of 400s, by exception. Other kinds of `RequestError` have none."""

NOT_STORED = "previous_response_not_found"
"""`error.code` where a response that a request continues is not stored; another server may have it."""

_TEMPLATE_TEXTS = (
    "messages",
    "continue_final_message",
    "the messages",
    "the last message",
    "the template variable",
    "the template's variables",
    "the chat template refuses",
    "the chat template prints more",
    "the chat template changes the last message",
    "the chat template takes more memory",
)
"""Beginnings of chat template errors that are about the request; clients get these."""


_OWN_FAULTS = ("structured_outputs:", "structured_outputs.", "no token is left")
"""Beginnings of generation errors that are the request's fault: it would fail on any server."""


class ApiError(Exception):
    """An error response in OpenAI's format.

    Args:
        status: HTTP status.
        message: what is wrong, the value found, what is allowed, what to do.
        type: OpenAI's error type; default: that of the status (`TYPES`).
        param: the field at fault.
        code: stable name of this error, for programs.
        headers: response headers, such as `retry-after`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self, path: str = "") -> dict[str, Any]:
        """The response's JSON; in a stream, the data of the error event.

        Args:
            path: the request's; Anthropic's routes have their own format.
        """
        if path.startswith(ANTHROPIC):
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def stream_body(self, path: str) -> dict[str, Any]:
        """The same for a stream with named events, as the data of an "error" event."""
        if path.startswith(ANTHROPIC):
            return self.body(path)
        return {"type": "error", "code": self.code or self.type, "message": self.message, "param": self.param}


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400: the request is wrong."""
    return ApiError(400, message, param=param, code=code)


def generation_error(failure: str) -> ApiError:
    """The response to a failed generation."""
    if failure.startswith(_OWN_FAULTS):
        return ApiError(400, failure, param="structured_outputs", code="generation_failed")
    return ApiError(500, failure, code="generation_failed")


def api_error(error: Exception) -> ApiError:
    """The response to any exception: 400 for what the client can fix, 503 if the engine or the tokenizers are gone, and
    otherwise a 500 with a fixed text. The caller logs the exception.
    """
    if isinstance(error, ApiError):
        return error
    code = next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), None)
    if isinstance(error, UnknownTemplateVariableError):
        return invalid(str(error), "chat_template_kwargs", code)
    if isinstance(error, ChatTemplateError):
        return _template_error(str(error), code)
    if isinstance(error, RequestError):
        return invalid(str(error), error.param, code)
    if isinstance(error, EngineClosedError):
        message = "the engine is not running; try again"
        return ApiError(503, message, code="engine_unavailable", headers={"retry-after": "1"})
    if isinstance(error, TokenizerUnavailableError):
        return ApiError(503, str(error), code="tokenizer_unavailable", headers={"retry-after": "2"})
    return ApiError(500, INTERNAL_ERROR, code="internal_error")


def _template_error(text: str, code: str | None) -> ApiError:
    """A chat template's error; a text that may contain a path or a library's message is replaced."""
    if "no chat template" in text:
        text = "this model has no chat template; use /v1/completions with a prompt that you render yourself"
        code = "no_chat_template"
    elif not text.startswith(_TEMPLATE_TEXTS):
        text = "the chat template failed on these messages; check their roles, their order and their fields"
    return invalid(text, "messages", code)
