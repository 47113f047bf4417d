"""Renders the templates that tenants upload, each in a forked, confined process with limits on time and memory."""

from __future__ import annotations

import queue
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.file_names import TEMPLATE_FILE
from loramux.adapter_store.validation.fork_server import ForkServer, ForkServerFailed, last_line
from loramux.adapter_store.validation.validator import worker_environment
from loramux.platform.errors import InvalidRequest, RateLimited, Unavailable
from loramux.platform.threads import call_on
from loramux.platform.tokenizer.conversation import Conversation, TemplateRefused, reason
from loramux.platform.tokenizer.template_check import TemplateFeatures
from loramux.platform.tokenizer.template_kwargs import check_kwargs
from loramux.platform.tokenizer.template_worker import TemplateAnswer, TemplateRequest
from loramux.platform.turns import TenantTurns

MAX_TEMPLATE_CHARS = 64 * 1024
"""Longest template, in characters. The longest template of a supported model family has 17,000 characters."""

WALL_S = 3.0
"""Limit on a rendering's wall time, in seconds. It allows for a busy machine."""

NUM_PROCESSES = 4
"""Maximum number of concurrent renderings. Each tenant has at most one."""

MAX_WAITING_PER_TENANT = 256
"""Maximum number of a tenant's requests that are waiting or being rendered, about 1.5 s of work."""

MAX_KEPT = 512
"""Maximum number of compiled templates kept over all tenants."""

MAX_KEPT_PER_TENANT = 16
"""Maximum number of compiled templates kept per tenant."""

MAX_CODE_BYTES = 512 * 1024
"""Longest compiled template that is kept, in bytes. For the supported model families, the longest has 70,000 bytes."""

NICENESS = 1
"""Niceness of a rendering. It gives the engine and the gateway only a slight priority, because a request waits for the
rendering.
"""

RETRY_S = 1.0

_WORKER = (sys.executable, "-P", "-m", "loramux.platform.tokenizer.template_worker")

_TOO_LONG = f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters"

_TOO_COSTLY = TemplateAnswer(refused="the chat template takes too much time or memory")

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Known:
    """A tenant's compiled template and its features, as a worker process returned them earlier."""

    code: bytes | None = None
    features: TemplateFeatures | None = None


class TenantTemplates:
    """Renders and checks tenants' templates.

    Each tenant has one rendering at a time. Its other requests wait, without delaying other tenants. Not thread-safe:
    use it only from the event loop.
    """

    def __init__(
        self,
        special_tokens: Mapping[str, str],
        max_waiting_per_tenant: int = MAX_WAITING_PER_TENANT,
        command: Sequence[str] = _WORKER,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._turns = TenantTurns(max_waiting_per_tenant, _too_many_waiting)
        self._all = [ForkServer(command, worker_environment(), NICENESS) for _ in range(NUM_PROCESSES)]
        # Last in, first out, so that few concurrent requests start few processes.
        self._idle: queue.LifoQueue[ForkServer] = queue.LifoQueue()
        for processes in self._all:
            self._idle.put(processes)
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="templates")
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()

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
    ) -> str:
        """Like `ChatTemplate.render`, but in a confined process. Raises InvalidRequest, RateLimited or Unavailable."""
        check_kwargs(kwargs or {})
        try:
            conversation = Conversation(
                messages=messages,
                tools=tools,
                kwargs=kwargs or {},
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except TemplateRefused as refused:
            raise InvalidRequest(refused.message, param=refused.param) from None
        answer = await self._answer(tenant_id, source, conversation)
        assert answer.text is not None
        return answer.text

    async def features(self, tenant_id: str, source: str) -> TemplateFeatures:
        """Return the features of a template, which is checked on its first use. Raises the same errors as `check`."""
        known = self._known.get((tenant_id, source))
        if known is not None and known.features is not None:
            return known.features
        return await self.check(tenant_id, source)

    async def check(self, tenant_id: str, source: str) -> TemplateFeatures:
        """Return the features of a template. Raises RateLimited, Unavailable, or InvalidRequest if the template is not
        usable.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidRequest(_TOO_LONG, param="chat_template", code="chat_template_refused")
        try:
            answer = await self._answer(tenant_id, source, None)
        except InvalidRequest as refused:
            raise InvalidRequest(refused.message, param="chat_template", code="chat_template_refused") from None
        assert answer.features is not None
        return answer.features

    def check_upload(self, source: str) -> None:
        """Check an uploaded template. Raises Unavailable, or AdapterRejected if the template is not usable.
        Blocking.
        """
        refused: str | None = _TOO_LONG
        if len(source) <= MAX_TEMPLATE_CHARS:
            refused = self._run(self._request(source, None, None)).refused
        if refused is not None:
            raise AdapterRejected("invalid_template", refused, TEMPLATE_FILE)

    def preload(self) -> None:
        self._threads.submit(self._run, TemplateRequest(source="", code=None, special_tokens={}, conversation=None))

    def close(self) -> None:
        for processes in self._all:
            processes.close()
        self._threads.shutdown(cancel_futures=True)

    async def _answer(self, tenant_id: str, source: str, conversation: Conversation | None) -> TemplateAnswer:
        answer = await self._turns.run(tenant_id, lambda: self._rendered(tenant_id, source, conversation))
        if answer.refused is not None:
            raise InvalidRequest(answer.refused, param=answer.param)
        return answer

    async def _rendered(self, tenant_id: str, source: str, conversation: Conversation | None) -> TemplateAnswer:
        known = self._known.get((tenant_id, source))
        request = self._request(source, None if known is None else known.code, conversation)
        answer = await call_on(self._threads, self._run, request)
        self._keep((tenant_id, source), answer)
        return answer

    def _request(self, source: str, code: bytes | None, conversation: Conversation | None) -> TemplateRequest:
        return TemplateRequest(source=source, code=code, special_tokens=self._special_tokens, conversation=conversation)

    def _keep(self, key: tuple[str, str], answer: TemplateAnswer) -> None:
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

    def _run(self, request: TemplateRequest) -> TemplateAnswer:
        """Render or check a template in a process. Blocking. Raises Unavailable if the process cannot be started."""
        try:
            encoded = msgspec.json.encode(request)
        except (RecursionError, UnicodeEncodeError) as error:
            return TemplateAnswer(refused=f"the chat template cannot read these messages: {reason(error)}")
        processes = self._idle.get()
        try:
            ended = processes.run(encoded, WALL_S)
        except ForkServerFailed as error:
            log.warning("template_rendering_failed", error=str(error))
            raise Unavailable(
                "chat templates of adapters are not available now",
                code="templates_unavailable",
                retry_after_s=RETRY_S,
            ) from error
        finally:
            self._idle.put(processes)
        if ended.returncode > 0:
            log.warning("template_rendering_failed", error=last_line(ended.stderr))
        if ended.took_too_long or ended.returncode != 0:
            return _TOO_COSTLY
        try:
            return msgspec.json.decode(ended.stdout, type=TemplateAnswer)
        except msgspec.MsgspecError:
            return _TOO_COSTLY


def _too_many_waiting() -> RateLimited:
    return RateLimited(
        "this tenant already has too many requests waiting for a chat template to be rendered",
        code="too_many_templates",
        retry_after_s=RETRY_S,
    )
