"""POST /tokenize and /detokenize, in vLLM's format. They wait in the same queue as calls for text."""

from __future__ import annotations

from typing import Any

from quire.errors import TokenOutOfRangeError
from quire.server.generation import Document, render
from quire.server.protocol import DetokenizeCall, TokenizeCall


class Tokenize(Document):
    """One call of POST /tokenize: the tokens of a text or a chat."""

    async def _document(self, call: TokenizeCall) -> dict[str, Any]:
        pool, info = self._shared.pool, self._context.client.info
        if call.prompt is not None:
            [tokens] = await pool.encode([call.prompt], call.add_special_tokens, parse_special=call.parse_special)
        else:
            tokens = (await render(pool, call)).token_ids
        texts = await pool.token_texts(tokens) if call.return_token_strs else None
        longest = info.max_model_len if info is not None else None
        return {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": texts}


class Detokenize(Document):
    """One call of POST /detokenize: the text of tokens."""

    async def _document(self, call: DetokenizeCall) -> dict[str, Any]:
        info = self._context.client.info
        largest = max(call.tokens, default=0)
        if info is not None and largest >= info.vocab_size:
            message = f"tokens has the token id {largest}, but the model's ids are 0 to {info.vocab_size - 1}"
            raise TokenOutOfRangeError(message, param="tokens")
        return {"prompt": await self._shared.pool.decode(call.tokens)}
