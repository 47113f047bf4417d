"""The process that renders tenants' templates: `python -m loramux.platform.tokenizer.template_worker`.

Each fork confines itself, reads one request from standard input, and answers on standard output. A template that takes
too much time or memory ends only its own fork.
"""

from __future__ import annotations

import gc
import marshal
import math
import os
import resource
import sys
from functools import partial
from pathlib import Path

import msgspec

from loramux.adapter_store.sandbox.confinement import ESSENTIAL, REQUIRED, confine, limit_resources
from loramux.adapter_store.sandbox.fork_server import fork_for_each_request
from loramux.engine.chat_templates.conversation import Conversation, reason, render
from loramux.engine.chat_templates.jinja_sandbox import MAX_RENDER_S, ChatEnvironment
from loramux.engine.chat_templates.template_check import TemplateFeatures, check_template
from loramux.engine.chat_templates.template_refused import TemplateRefused

CPU_S = 1.5 * MAX_RENDER_S
"""Limit on a fork's processor time, in seconds."""

MEMORY_BYTES = 256 << 20
"""Limit on the additional memory of one rendering, in bytes."""

ANSWER_BYTES = 4 << 20
"""Longest answer, in bytes."""

_FIRST_TEMPLATE = "{{ messages[0].content }}{{ strftime_now('%c') }}"


class TemplateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A template and the conversation to render with it. Without a conversation, the template is checked."""

    source: str
    code: bytes | None
    """The compiled template, if an earlier answer contained it."""
    special_tokens: dict[str, str]
    conversation: Conversation | None


class TemplateAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rendered text, the features, or the reason for a refusal. The compiled template is included unless the
    request had it.
    """

    text: str | None = None
    features: TemplateFeatures | None = None
    code: bytes | None = None
    refused: str | None = None
    param: str = "messages"


def answer_to(request: TemplateRequest, environment: ChatEnvironment) -> TemplateAnswer:
    try:
        # An earlier fork compiled this code from the same tenant's template. Like the template, it runs only in forks.
        code = marshal.loads(request.code) if request.code else environment.compiled(request.source)  # noqa: S302
        template = environment.template(code)
    except Exception as error:  # a malformed template can raise anything
        return TemplateAnswer(refused=f"the chat template is malformed: {reason(error)}", param="chat_template")
    compiled = None if request.code else marshal.dumps(code)
    rendered = partial(render, environment, template, request.source, request.special_tokens)
    try:
        if request.conversation is None:
            return TemplateAnswer(features=check_template(rendered, request.source), code=compiled)
        return TemplateAnswer(text=rendered(request.conversation), code=compiled)
    except TemplateRefused as refused:
        return TemplateAnswer(refused=refused.message, param=refused.param, code=compiled)


def main() -> int:
    environment, decoder, encoder = ChatEnvironment(), msgspec.json.Decoder(TemplateRequest), msgspec.json.Encoder()
    # Render once before forking, to load state that a confined fork cannot read, such as the time zone.
    first = TemplateRequest(source=_FIRST_TEMPLATE, code=None, special_tokens={}, conversation=None)
    encoder.encode(answer_to(decoder.decode(encoder.encode(first)), environment))
    # Otherwise a garbage collection in a fork would copy the memory pages of all existing objects.
    gc.freeze()
    fork_for_each_request(idle_s=None)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit_resources(used_bytes + MEMORY_BYTES, ANSWER_BYTES, math.ceil(CPU_S))
    confine((), ESSENTIAL if REQUIRED in sys.argv else ())
    answer = encoder.encode(answer_to(decoder.decode(sys.stdin.buffer.read()), environment))
    if len(answer) > ANSWER_BYTES:
        answer = encoder.encode(TemplateAnswer(refused=f"the prompt is longer than {ANSWER_BYTES} bytes"))
    sys.stdout.buffer.write(answer)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
