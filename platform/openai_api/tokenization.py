"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from loramux.platform.accounts.model_names import require_inference
from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.bodies.request_body import parse_body, parse_object, read_body, validated
from loramux.platform.bodies.sampling_fields import MAX_MODEL_NAME
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import Target
from loramux.platform.openai_api.chat import CHAT
from loramux.platform.openai_api.openapi_schemas import DetokenizeDocument, TokenizeDocument, TokenizerInfoDocument
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.endpoint import Received
from loramux.platform.requests.error_responses import json_response, request_id_of
from loramux.platform.requests.openapi import errors, takes
from loramux.platform.requests.request_life import prepare, resolve
from loramux.platform.requests.services import GatewayServices

router = APIRouter(tags=["tokens"])


class TokenizePrompt(StrictModel):
    """The body of `/tokenize` for a plain prompt. `model` defaults to the base."""

    prompt: str
    model: str | None = Field(None, max_length=MAX_MODEL_NAME)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatRequest):
    """The body of `/tokenize` for a conversation. It can have all fields of a `/v1/chat/completions` body.

    The template already writes special tokens. With `add_special_tokens`, the rendered text is also surrounded by the
    special tokens of a plain prompt.
    """

    model: str = Field("", max_length=MAX_MODEL_NAME)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @property
    def adds_special_tokens(self) -> bool:
        return bool(self.add_special_tokens)


class DetokenizeRequest(StrictModel):
    """The body of `/detokenize`."""

    tokens: Annotated[list[int], Field(fail_fast=True)]
    model: str | None = Field(None, max_length=MAX_MODEL_NAME)


@router.post(
    "/tokenize",
    openapi_extra=takes(TokenizePrompt, TokenizeChat),
    response_model=TokenizeDocument,
    responses=errors(404, 409),
)
async def tokenize(request: Request, caller: Caller, services: Services) -> Response:
    """Tokenize a prompt or a conversation as a completion would, without running it. No quota is charged."""
    sent = await read_body(request, services.settings.max_body_bytes)
    body = await services.compute_if_long(len(sent), _parse, sent)
    target = await resolve(services, caller, body.model or services.callers.resolver.served_name)
    if isinstance(body, TokenizeChat):
        received: Received[ChatRequest] = Received(request_id_of(request), body, len(sent))
        [ids] = (await prepare(services, CHAT, target, received)).prompts
    else:
        ids = await services.compute_if_long(len(sent), _ids, services, target, body)
    token_strs = None
    if body.return_token_strs:
        token_strs = await services.compute_if_long(len(ids), target.tokenizer.token_strings, ids)
    return json_response(
        {"count": len(ids), "max_model_len": services.max_model_len, "tokens": ids, "token_strs": token_strs}
    )


@router.post(
    "/detokenize", openapi_extra=takes(DetokenizeRequest), response_model=DetokenizeDocument, responses=errors(404, 409)
)
async def detokenize(request: Request, caller: Caller, services: Services) -> Response:
    """Turn token ids into text, including special tokens. No quota is charged."""
    sent = await read_body(request, services.settings.max_body_bytes)
    body = await services.compute_if_long(len(sent), parse_body, sent, DetokenizeRequest)
    target = await resolve(services, caller, body.model or services.callers.resolver.served_name)
    most, vocab_size = services.max_model_len, target.vocab_size
    if len(body.tokens) > most:
        raise InvalidRequest(
            f"tokens must not have more than {most} ids, the model's maximum context length",
            param="tokens",
            code="context_length_exceeded",
        )
    if not all(0 <= token < vocab_size for token in body.tokens):
        raise InvalidRequest(f"token ids must be from 0 to {vocab_size - 1}", param="tokens")
    return json_response({"prompt": await services.compute_if_long(len(sent), _text, target, body.tokens)})


@router.get("/tokenizer_info", response_model=TokenizerInfoDocument)
async def tokenizer_info(caller: Caller, services: Services) -> Response:
    """Describe the base's tokenizer: its configuration, special tokens and chat template."""
    require_inference(caller)
    return json_response({**services.prompts.tokenizer.info, "model_max_length": services.max_model_len})


def _parse(sent: bytes) -> TokenizePrompt | TokenizeChat:
    document = parse_object(sent)
    if "messages" not in document:
        return validated(document, TokenizePrompt)
    body = validated(document, TokenizeChat)
    body.check()
    return body


def _ids(services: GatewayServices, target: Target, body: TokenizePrompt) -> tuple[int, ...]:
    """Return the token IDs. Like a completion, raises InvalidRequest for a text that cannot fit in the context."""
    return target.tokenizer.encode(
        body.prompt, services.max_model_len, add_special_tokens=body.add_special_tokens is not False
    )


def _text(target: Target, ids: list[int]) -> str:
    return target.tokenizer.decode(ids, skip_special_tokens=False)
