"""Fields of OpenAI, vLLM and SGLang that this server does not have, and the values of them that it accepts.

Clients send fields that they never set. A field is accepted if its value asks for nothing: null, the default that its
vendor documents, or an empty value that means the same as null. The tables list these values except null, which is
accepted for every field. A request with any other value is refused, and the error names the field.

Sources: OpenAI's API reference and openai-python 3.57, and the request classes of vLLM 0.33 and SGLang 0.5.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Neutral: TypeAlias = Mapping[str, tuple[Any, ...]]

BOTH: Neutral = {
    # vLLM
    "cache_salt": (),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": ({},),
    "repetition_detection": (),
    "request_id": (),
    # Earlier versions of vLLM document true. Both values matter only for its render endpoints.
    "return_mm_kwargs": (True,),
    "return_token_offsets": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "session_id": (),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # SGLang
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "data_parallel_rank": (),
    "disagg_prefill_dp_rank": (),
    "extra_key": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "rid": (),
    "routed_dp_rank": (),
    "session_params": ({},),
    "stop_regex": ([],),
}
"""Fields of both endpoints."""

CHAT: Neutral = {
    **BOTH,
    # OpenAI
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "media_io_kwargs": ({},),
    "return_prompt_text": (False,),
    # SGLang
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
}

COMPLETIONS: Neutral = {
    **BOTH,
    # OpenAI
    "suffix": ("",),
    # vLLM
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "thinking_token_budget": (-1,),
    # SGLang
    "custom_labels": ({},),
}

RESPONSES: Neutral = {
    # OpenAI
    "access_programs": (),
    "context_management": ([],),
    "image": ({},),
    "moderation": (),
    "prompt": (),
    # vLLM
    "cache_salt": (),
    "chat_template": (),
    "enable_response_messages": (False,),
    "kv_transfer_params": ({},),
    "mm_processor_kwargs": ({},),
    "previous_input_messages": ([],),
    "previous_response": (),
    "request_id": (),
    "vllm_xargs": ({},),
}

POOLING: Neutral = {
    # OpenAI
    "stream": (False,),
    # vLLM
    "additional_data": (),
    "cache_salt": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "padding": ("do_not_pad",),
    "request_id": (),
    # vLLM, beside a conversation
    "chat_template": (),
    "media_io_kwargs": ({},),
    # SGLang
    "image": (),
    "lora_path": (),
    "rid": (),
}
"""Fields of embeddings and classes."""

PAIRS: Neutral = {
    **POOLING,
    # vLLM
    "chat_template_kwargs": ({},),
    "instruction": (),
    # Cohere
    "max_chunks_per_doc": (),
    "rank_fields": (["text"], []),
}
"""Fields of scores and rankings."""

EMBED: Neutral = {
    # Cohere
    "images": ([],),
    "inputs": ([],),
    # vLLM
    "cache_salt": (),
    "request_id": (),
}
"""Fields of embeddings in Cohere's form."""

FUNCTION: Neutral = {"defer_loading": (False,)}
"""Fields of a function and of a tool."""

RESPONSE_FORMAT: Neutral = {"json_schema": ()}
"""Fields of a `response_format` of another type."""

STRUCTURED_OUTPUTS: Neutral = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "whitespace_pattern": (),
}

RESPONSES_TOOL: Neutral = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
"""Fields of a tool of the Responses API."""

RESPONSES_ITEM: Neutral = {
    "async": (False,),
    # The name that openai-python's `model_dump` gives the field.
    "async_": (False,),
    "caller": ({"type": "direct"},),
    "created_by": (),
    "namespace": (),
}
"""Fields of an input item of the Responses API."""

RESPONSES_TEXT: Neutral = {"verbosity": ("medium",)}

RESPONSES_REASONING: Neutral = {"context": ("auto",), "mode": ("standard",)}

NESTED = frozenset(
    {
        *FUNCTION,
        *RESPONSE_FORMAT,
        *STRUCTURED_OUTPUTS,
        *RESPONSES_TOOL,
        *RESPONSES_ITEM,
        *RESPONSES_TEXT,
        *RESPONSES_REASONING,
    }
)

REASONS: Mapping[str, str] = {
    "access_programs": "there are no access programs",
    "add_special_tokens": "completion prompts always get special tokens, and chat templates write their own",
    "audio": "the server generates text only",
    "bootstrap_host": "prefill and decoding run in one engine",
    "bootstrap_port": "prefill and decoding run in one engine",
    "bootstrap_room": "prefill and decoding run in one engine",
    "cache_salt": "prefix caches are separate for each tenant already",
    "chat_template": "templates belong to models; a request cannot supply one",
    "context_management": "the server does not compact conversations",
    "custom_labels": "metrics have no labels that a client chooses",
    "custom_logit_processor": "requests cannot run code in the engine",
    "custom_params": "requests cannot run code in the engine",
    "data_parallel_rank": "the server chooses the replica",
    "disagg_prefill_dp_rank": "prefill and decoding run in one engine",
    "documents": "the server passes no documents to the chat template",
    "early_stopping": "there is no beam search",
    "ec_transfer_params": "the server accepts text only",
    "enable_response_messages": "the response has no messages besides its output",
    "extra_key": "prefix caches are separate for each tenant already",
    "function_call": "use `tool_choice`, its newer form",
    "functions": "use `tools`, its newer form",
    "guided_whitespace_pattern": "the whitespace in JSON cannot be chosen",
    "image": "the server accepts text only",
    "kv_transfer_params": "prefill and decoding run in one engine",
    "length_penalty": "there is no beam search",
    "logits_processors": "requests cannot run code in the engine",
    "lora_path": "`model` names the adapter",
    "max_dynamic_patch": "the server accepts text only",
    "media_io_kwargs": "the server accepts text only",
    "min_dynamic_patch": "the server accepts text only",
    "mm_payload": "the server accepts text only",
    "mm_processor_kwargs": "the server accepts text only",
    "modalities": "the server generates text only",
    "moderation": "the server does not moderate content",
    "no_stop_trim": "use `include_stop_str_in_output`",
    "previous_input_messages": "send the items of earlier turns in `input`",
    "previous_response": "send the items of earlier turns in `input`",
    "prompt_embeds": "prompts are text or token ids",
    "repetition_detection": "an answer does not end because it repeats itself; use `repetition_penalty`",
    "request_id": "the server chooses the identifier, which `x-request-id` reports",
    "return_cached_tokens_details": "`usage` reports the number of cached tokens",
    "return_hidden_states": "answers contain no hidden states",
    "return_mm_kwargs": "the server accepts text only",
    "return_prompt_text": "answers do not repeat the rendered prompt; use `/tokenize`",
    "return_routed_experts": "answers do not report routed experts",
    "return_token_offsets": "answers do not report the offsets of tokens",
    "return_weight_versions": "the header `x-loramux-adapter` reports the version",
    "rid": "the server chooses the identifier, which `x-request-id` reports",
    "routed_dp_rank": "the server chooses the replica",
    "routed_experts_prompt_start": "answers do not report routed experts",
    "separate_reasoning": "the reasoning is always returned separately",
    "session_id": "the server has no sessions; use `user`",
    "session_params": "the server has no sessions",
    "spaces_between_special_tokens": "the server adds no spaces that the tokenizer does not add",
    "stop_regex": "stop strings are plain text",
    "stream_interval": "tokens are sent as soon as possible",
    "stream_reasoning": "the reasoning is streamed like the rest of the answer",
    "structured_outputs.disable_additional_properties": "set `additionalProperties` in the schema",
    "structured_outputs.disable_any_whitespace": "the whitespace in JSON cannot be chosen",
    "structured_outputs.whitespace_pattern": "the whitespace in JSON cannot be chosen",
    "suffix": "the base is not trained to fill in the middle",
    "use_beam_search": "there is no beam search; sample several choices with `n`",
    "verbosity": "only OpenAI's own models support it",
    "vllm_xargs": "the server has no plug-ins",
    "watermarking": "the server does not watermark answers",
    "web_search_options": "the server does not search the web",
}
"""Why the generation endpoints refuse a field, or what to use instead. Error messages and the documentation say it."""

NEAR: Mapping[str, str] = {
    "enable_thinking": "chat_template_kwargs",
    "max_new_tokens": "max_tokens",
    "reasoning": "reasoning_effort",
    "thinking": "reasoning_effort",
}
"""Fields of other servers, with the field that does the same here."""


def asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether `value` is null or one of the neutral values. 1 equals 1.0, but neither equals true."""
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
