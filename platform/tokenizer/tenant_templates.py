"""Renders the templates that tenants upload, each in a forked, confined process with limits on time and memory."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.file_names import TEMPLATE_FILE
from loramux.adapter_store.formats.version_files.added_vocabulary import SpecialTokens
from loramux.adapter_store.sandbox.confined_pool import (
    ConfinedPool,
    Ended,
    ForkLimits,
    ForkServerFailed,
    TooManyWaiting,
)
from loramux.adapter_store.sandbox.confinement import REQUIRED
from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.chat_templates.conversation import Conversation, reason
from loramux.engine.chat_templates.template_check import TemplateFeatures
from loramux.engine.chat_templates.template_refused import TemplateRefused
from loramux.platform.errors import InvalidRequest, RateLimited, Unavailable
from loramux.platform.tokenizer.template_worker import CPU_S, TemplateAnswer, TemplateRequest

MAX_TEMPLATE_CHARS = 64 * 1024
"""Longest template, in characters. The longest template of a supported model family has 17,000 characters."""

QUICK = ForkLimits(wall_s=1.0, cpu_s=0.1, niceness=1)
"""Limits of a rendering's first attempt. Most renderings take less than 30 ms. The engine and the gateway have only a
slightly higher priority, because a request waits for the rendering.
"""

FULL = ForkLimits(wall_s=15.0, cpu_s=CPU_S, niceness=5)
"""Limits of a rendering's second attempt, which yields to first attempts. On a core that another process keeps busy, it
gets a quarter of the time. A rendering that exceeds the wall time can be asked for again.
"""

NUM_PROCESSES = 4
"""Maximum number of concurrent renderings. Each tenant has at most one."""

MAX_FULL = 1
"""Maximum number of concurrent second attempts."""

MAX_WAITING_PER_TENANT = 256
"""Maximum number of a tenant's requests that are waiting or being rendered, about 1.5 s of work."""

MAX_KEPT = 512
"""Maximum number of compiled templates kept over all tenants."""

MAX_KEPT_PER_TENANT = 16
"""Maximum number of compiled templates kept per tenant."""

MAX_CODE_BYTES = 512 * 1024
"""Longest compiled template that is kept, in bytes. For the supported model families, the longest has 70,000 bytes."""

RETRY_S = 1.0

_WORKER = (sys.executable, "-P", "-m", "loramux.platform.tokenizer.template_worker")

_TOO_LONG = f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters"

_TOO_COSTLY = TemplateAnswer(refused="the chat template takes too much time or memory")

_UPLOADS = "(uploads)"
"""Stands for all tenants when uploaded templates are checked, one at a time."""

_Key = tuple[str, str, SpecialTokens]
"""A tenant, the source of a template, and the special tokens of its version."""


@dataclass(slots=True)
class _Known:
    """A tenant's compiled template and its features, as a worker process returned them earlier."""

    code: bytes | None = None
    features: TemplateFeatures | None = None


class TenantTemplates:
    """Renders and checks tenants' templates.

    `special_tokens` are the base's, and `base` is its own template. A version can have other special tokens. Each
    tenant has one rendering at a time. `ConfinedPool` bounds the time for which other tenants can delay it.
    Thread-safe.
    """

    def __init__(
        self,
        special_tokens: Mapping[str, str],
        base: ChatTemplate | None = None,
        max_waiting_per_tenant: int = MAX_WAITING_PER_TENANT,
        command: Sequence[str] = _WORKER,
        *,
        is_sandbox_required: bool = False,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._base = base
        self._pool = ConfinedPool(
            (*command, REQUIRED) if is_sandbox_required else command,
            event="template_rendering_failed",
            num_processes=NUM_PROCESSES,
            max_full=MAX_FULL,
            quick=QUICK,
            full=FULL,
            max_waiting_per_tenant=max_waiting_per_tenant,
        )
        self._lock = threading.Lock()
        self._known: OrderedDict[_Key, _Known] = OrderedDict()

    async def render(
        self,
        tenant_id: str,
        source: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        special_tokens: SpecialTokens = (),
    ) -> str:
        """Like `ChatTemplate.render`, but in a confined process. Raises InvalidRequest, RateLimited or Unavailable."""
        try:
            conversation = Conversation(
                messages=messages,
                tools=tools,
                kwargs=kwargs or {},
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except TemplateRefused as refused:
            raise InvalidRequest(refused.message, param=refused.param, code=refused.code) from None
        answer = await self._answer((tenant_id, source, special_tokens), conversation)
        assert answer.text is not None
        return answer.text

    async def features(self, tenant_id: str, source: str, special_tokens: SpecialTokens = ()) -> TemplateFeatures:
        """Return the features of a template, which is checked on its first use. Raises the same errors as `check`."""
        known = self._known.get((tenant_id, source, special_tokens))
        if known is not None and known.features is not None:
            return known.features
        return await self.check(tenant_id, source, special_tokens)

    async def check(self, tenant_id: str, source: str, special_tokens: SpecialTokens = ()) -> TemplateFeatures:
        """Return the features of a template. Raises RateLimited, Unavailable, or InvalidRequest if the template is not
        usable.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidRequest(_TOO_LONG, param="chat_template", code="chat_template_refused")
        try:
            answer = await self._answer((tenant_id, source, special_tokens), None)
        except InvalidRequest as refused:
            raise InvalidRequest(refused.message, param="chat_template", code="chat_template_refused") from None
        assert answer.features is not None
        return answer.features

    def check_upload(self, source: str, special_tokens: SpecialTokens = ()) -> bool:
        """Check an uploaded template. Return False if it is a copy of the base's template. Raises Unavailable, or
        AdapterRejected if the template is not usable. Blocking.
        """
        if self.is_copy(source, special_tokens):
            return False
        refused: str | None = _TOO_LONG
        if len(source) <= MAX_TEMPLATE_CHARS:
            with _api_errors():
                key = _UPLOADS, source, special_tokens
                asked = self._pool.submit(_UPLOADS, partial(self._encoded, key, None), _decoded)
                refused = asked.result().refused
        if refused is not None:
            raise AdapterRejected("invalid_template", refused, TEMPLATE_FILE)
        return True

    def is_copy(self, source: str, special_tokens: SpecialTokens) -> bool:
        """Return whether a version's template is a copy of the base's."""
        return self._base is not None and self._base.is_copied_by(source, special_tokens)

    def preload(self) -> None:
        self._pool.submit(_UPLOADS, partial(self._encoded, (_UPLOADS, "", ()), None), _decoded)

    def close(self) -> None:
        self._pool.close()

    async def _answer(self, key: _Key, conversation: Conversation | None) -> TemplateAnswer:
        with _api_errors():
            asked = self._pool.submit(
                key[0], partial(self._encoded, key, conversation), partial(self._kept_answer, key)
            )
            answer = await asyncio.wrap_future(asked)
        if answer.refused is not None:
            raise InvalidRequest(answer.refused, param=answer.param)
        return answer

    def _encoded(self, key: _Key, conversation: Conversation | None) -> bytes:
        with self._lock:
            code = self._known[key].code if key in self._known else None
        _, source, own_tokens = key
        special_tokens = {**self._special_tokens, **dict(own_tokens)}
        request = TemplateRequest(source=source, code=code, special_tokens=special_tokens, conversation=conversation)
        try:
            return msgspec.json.encode(request)
        except (RecursionError, UnicodeEncodeError) as error:
            raise InvalidRequest(
                f"the chat template cannot read these messages: {reason(error)}", param="messages"
            ) from None

    def _kept_answer(self, key: _Key, ended: Ended) -> TemplateAnswer:
        answer = _decoded(ended)
        with self._lock:
            self._keep(key, answer)
        return answer

    def _keep(self, key: _Key, answer: TemplateAnswer) -> None:
        known = self._known.get(key)
        if known is None:
            of_tenant = [one for one in self._known if one[0] == key[0]]
            if len(of_tenant) >= MAX_KEPT_PER_TENANT:
                del self._known[of_tenant[0]]
            elif len(self._known) >= MAX_KEPT:
                self._known.popitem(last=False)
            known = self._known[key] = _Known()
        if answer.code is not None and len(answer.code) <= MAX_CODE_BYTES:
            known.code = answer.code
        if answer.features is not None:
            known.features = answer.features
        self._known.move_to_end(key)


def _decoded(ended: Ended) -> TemplateAnswer:
    if ended.returncode != 0:
        return _TOO_COSTLY
    try:
        return msgspec.json.decode(ended.stdout, type=TemplateAnswer)
    except msgspec.MsgspecError:
        return _TOO_COSTLY


@contextmanager
def _api_errors() -> Iterator[None]:
    """Raise the errors of the pool as the errors that callers see."""
    try:
        yield
    except TooManyWaiting:
        raise RateLimited(
            "this tenant already has too many requests waiting for a chat template to be rendered",
            code="too_many_templates",
            retry_after_s=RETRY_S,
        ) from None
    except ForkServerFailed as error:
        raise Unavailable(
            "chat templates of adapters are not available now", code="templates_unavailable", retry_after_s=RETRY_S
        ) from error
