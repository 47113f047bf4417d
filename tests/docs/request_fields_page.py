from __future__ import annotations

import json
from collections.abc import Iterator

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from loramux.engine.chat_templates.template_kwargs import MAX_KWARGS, MAX_SIZE
from loramux.engine.scheduling.request_limits import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_LOGPROB_TOKEN_IDS,
)
from loramux.platform.bodies import unsupported_fields
from loramux.platform.bodies.chat_request import MAX_MESSAGES, MAX_METADATA, ChatRequest
from loramux.platform.bodies.generation_request import GenerationRequest, StreamOptions
from loramux.platform.bodies.prompts import MAX_PROMPTS
from loramux.platform.bodies.sampling_fields import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_MODEL_NAME,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from loramux.platform.bodies.tools import MAX_TOOLS
from loramux.platform.bodies.unsupported_fields import Neutral
from loramux.platform.openai_api.completion_request import CompletionRequest
from loramux.platform.requests.planning import MAX_END_USER
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.responses_api.response_request import ResponseRequest

HEAD = """# Request fields

`make docs` generates this page from the request bodies that the server accepts, and a test checks that it is
current. The page lists every field of this server's chat, completions and responses endpoints, of the same endpoints
of OpenAI, and of the vLLM and SGLang extensions to them. Of the other endpoints, [Endpoints](endpoints.md) lists the
fields.

- **done**: the field works.
- **no effect**: the field is accepted, and the answer is the same without it.
- **refused**: a request with the field gets 400 `unsupported_parameter`, and the error names the field, unless the
  value asks for nothing. Such values are null, the default that the field's vendor documents, and empty values that
  mean the same. The last column lists them and says why other values are refused.
- **–**: the field does not belong to this endpoint. A request with it gets 400 `unknown_parameter`.

| field | chat | completions | responses | meaning, or reason for the refusal |
|---|---|---|---|---|
"""

_SETTINGS = GatewaySettings()

TAIL = f"""
## Limits of a request

A request beyond one of these limits gets 400, except where the table says otherwise.

| what | at most |
|---|---|
| the body | {_SETTINGS.max_body_bytes >> 20} MiB, also after decompression (413) |
| prompts times `n` or `best_of` | {_SETTINGS.max_choices:,} |
| texts in a request for embeddings, scores and the like | {MAX_PROMPTS:,} |
| tokens of all choices, each with its prompt and `max_tokens` | {_SETTINGS.max_request_tokens:,} |
| `messages`, items of `input` | {MAX_MESSAGES:,} |
| `tools` | {MAX_TOOLS:,} |
| `stop` | {MAX_STOP_STRINGS} texts of {MAX_STOP_CHARACTERS} characters |
| `stop_token_ids` | {MAX_STOP_TOKENS} |
| `logit_bias` | {MAX_BIASED_TOKENS} tokens, each from {-MAX_BIAS:g} to {MAX_BIAS:g} |
| `bad_words` | {MAX_BAD_WORDS} texts of {MAX_BAD_WORD_CHARACTERS} characters |
| `allowed_token_ids` | {MAX_ALLOWED_TOKENS:,} |
| `logprob_token_ids` | {MAX_LOGPROB_TOKEN_IDS} |
| `metadata` | {MAX_METADATA} entries |
| `chat_template_kwargs` | {MAX_KWARGS} entries, {MAX_SIZE >> 10} KiB in all |
| `model` | {MAX_MODEL_NAME} characters |
| `user` | {MAX_END_USER} characters. A longer one is not refused, but recorded as `sha256:` and its hash |
"""

MEANINGS = {
    **unsupported_fields.REASONS,
    "add_generation_prompt": "whether the rendered conversation ends with the start of an answer",
    "allowed_token_ids": "the only tokens that the answer can contain, up to 1,024, including the end of sequence",
    "background": "the response is made without a connection, and retrieved later",
    "bad_words": "up to 64 words that the answer must not contain, with and without a space before them",
    "best_of": "generates this many choices and returns the `n` with the highest mean log-probability; all are billed",
    "chat_template_kwargs": "additional variables of the chat template, such as `enable_thinking`",
    "client_metadata": "any object; Codex sends it",
    "continue_final_message": "whether the answer continues the last message",
    "conversation": "continues and extends a stored conversation",
    "ebnf": "SGLang's name of `structured_outputs.grammar`",
    "echo": "completions: repeats the prompt before each choice, also in the log-probabilities, and cannot be streamed "
    "with `logprobs`; chat: repeats the assistant's last message, which the answer continues",
    "frequency_penalty": "lowers the logits of tokens in proportion to how often they have occurred in the answer",
    "guided_choice": "the older name of `structured_outputs.choice`",
    "guided_decoding_backend": "the server has only one backend",
    "guided_grammar": "the older name of `structured_outputs.grammar`",
    "guided_json": "the older name of `structured_outputs.json`",
    "guided_regex": "the older name of `structured_outputs.regex`",
    "ignore_eos": "continues after the end-of-sequence token",
    "include": "`message.output_text.logprobs` and `reasoning.encrypted_content`; OpenAI's other values have no effect",
    "include_reasoning": "`false` hides the reasoning, and with it the answer's token ids and log-probabilities",
    "include_stop_str_in_output": "whether the text includes the stop string or stop token that ended it",
    "input": "a string, or the items of the conversation",
    "instructions": "a system message before the input",
    "json_schema": "SGLang's name of `structured_outputs.json`",
    "logit_bias": "adds to the logits of tokens",
    "logprob_token_ids": "up to 128 tokens that `logprobs` lists in place of the most likely ones",
    "logprobs": "log-probabilities of the answer's tokens, including the token that ends it",
    "max_completion_tokens": "maximum number of tokens in each choice",
    "max_output_tokens": "maximum number of tokens in the answer",
    "max_tokens": "maximum number of tokens in each choice",
    "max_tool_calls": "limits calls of built-in tools, which the server does not run; the response repeats it",
    "messages": "the conversation",
    "metadata": "up to 64 strings, returned and stored with the answer",
    "min_p": "drops tokens whose probability is below this fraction of the highest",
    "min_tokens": "minimum number of tokens in each choice",
    "model": "the base or an adapter",
    "n": "the number of choices for each prompt",
    "parallel_tool_calls": "whether one answer can contain several tool calls",
    "prediction": "a text that the answer will probably contain: a source of [drafts](speculation.md), which do not "
    "change the answer",
    "presence_penalty": "lowers the logits of tokens that have occurred in the answer",
    "previous_response_id": "continues after a stored response",
    "priority": "orders the tenant's own waiting requests: lower values first, never ahead of other tenants' requests",
    "prompt": "completions: one or more prompts, as text or token ids; responses: the server has no prompt templates",
    "prompt_cache_key": "prefixes are cached without it; a response repeats it",
    "prompt_cache_options": "prefixes are cached without it",
    "prompt_cache_retention": "cached prefixes stay until their pages are needed",
    "prompt_logprobs": "log-probabilities of the prompt's tokens, with up to 5 alternatives; cannot be streamed",
    "reasoning": "`effort`, as in `reasoning_effort`; there are no summaries",
    "reasoning_effort": "how much the model thinks: the nearest effort that its chat template knows; `none` is off",
    "regex": "SGLang's name of `structured_outputs.regex`",
    "repetition_penalty": "lowers the probability of tokens that occur in the prompt or the answer",
    "response_format": "constrains the answer to a JSON schema, to JSON or to a structural tag",
    "return_token_ids": "answers and chunks contain the token ids of prompt and answer",
    "return_tokens_as_token_ids": "log-probabilities name each token `token_id:` and its id",
    "safety_identifier": "an identifier of the end user; use `user`. A response repeats it",
    "seed": "makes sampling repeatable",
    "service_tier": "the [service tier](service-tiers.md) of the request; the answer reports the tier that it got",
    "skip_special_tokens": "whether special tokens are left out of the text",
    "speculation": "`false`: neither [drafts](speculation.md) nor forced tokens for this request; they do not change "
    "the answer",
    "stop": "texts that end the answer",
    "stop_token_ids": "tokens that end the answer",
    "store": "whether the answer is stored, if the tenant allows it: true by default for responses, false for chat",
    "stream": "sends the answer as it is generated",
    "stream_options": "options of a stream",
    "stream_options.continuous_usage_stats": "with `include_usage`, every chunk reports the usage so far",
    "stream_options.include_obfuscation": "chunks are not padded",
    "stream_options.include_usage": "the last chunk reports the usage",
    "structured_outputs": "constrains the answer to a schema, a regex, choices, a grammar or a structural tag",
    "temperature": "scales the logits before sampling; 0 always takes the most likely token",
    "text": "`format`, as in `response_format`; a `verbosity` other than `medium` is refused",
    "thinking_token_budget": "ends the reasoning after this many tokens, if the template has markers for it",
    "tool_choice": "whether the answer must, may or must not call tools, or the tool that it must call",
    "tools": "functions, or in responses custom tools, that the answer can call, if the chat template supports tools",
    "top_k": "samples from this many of the most likely tokens",
    "top_logprobs": "the number of alternatives reported for each token",
    "top_p": "samples from the most likely tokens that together have this share of the probability that `top_k` leaves",
    "truncate_prompt_tokens": "keeps this many tokens at the end of each prompt; -1 keeps as many as fit the context",
    "truncation": "`auto`: the oldest messages of a conversation that is too long are dropped",
    "truncation_side": "`right`: `truncate_prompt_tokens` keeps the beginning of each prompt instead of its end",
    "user": "the end user in usage reports; keeps the user on one version of an alias",
}


def request_fields_page() -> str:
    return HEAD + "".join(f"{row}\n" for row in _rows()) + TAIL


def _rows() -> Iterator[str]:
    for name in sorted(known_fields()):
        states = " | ".join(_state(body, name) for body in (ChatRequest, CompletionRequest, ResponseRequest))
        yield f"| `{name}` | {states} | {MEANINGS[name]}{_accepted(name)} |"


def known_fields() -> set[str]:
    return {
        *ChatRequest.model_fields,
        *CompletionRequest.model_fields,
        *(f"stream_options.{name}" for name in StreamOptions.model_fields),
        *chat_create_params.CompletionCreateParamsBase.__annotations__,
        *completion_create_params.CompletionCreateParamsBase.__annotations__,
        *unsupported_fields.CHAT,
        *unsupported_fields.COMPLETIONS,
        *ResponseRequest.model_fields,
        *response_create_params.ResponseCreateParamsBase.__annotations__,
        *unsupported_fields.RESPONSES,
        *(f"structured_outputs.{name}" for name in unsupported_fields.STRUCTURED_OUTPUTS),
    }


def _state(body: type[GenerationRequest | ResponseRequest], name: str) -> str:
    if name in body.WITHOUT_EFFECT:
        return "no effect"
    parent, _, field = name.partition(".")
    if body is ResponseRequest and parent == "stream_options" and field:
        return "–"
    if parent in body.model_fields:
        is_refused = parent == "structured_outputs" and field in unsupported_fields.STRUCTURED_OUTPUTS
        return "refused" if is_refused else "done"
    return "refused" if name in body.NEUTRAL else "–"


def _accepted(name: str) -> str:
    """List the accepted values of a field that is refused otherwise."""
    parent, _, field = name.partition(".")
    bodies: dict[str, Neutral] = {
        " in chat": ChatRequest.NEUTRAL,
        " in completions": CompletionRequest.NEUTRAL,
        " in responses": ResponseRequest.NEUTRAL,
    }
    if parent == "structured_outputs":
        bodies = {"": unsupported_fields.STRUCTURED_OUTPUTS}
    values = {where: neutral[field or parent] for where, neutral in bodies.items() if (field or parent) in neutral}
    if not values:
        return ""
    if len({json.dumps(neutral) for neutral in values.values()}) == 1:
        values = {"": next(iter(values.values()))}
    listed = [f"`{json.dumps(value)}`{where}" for where, neutral in values.items() for value in neutral]
    return f" (accepted: {', '.join(['`null`', *listed])})"
