"""Runs queued evals, one question at a time, behind all other requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.adapter_store.errors import ClaimLost, InvalidEval
from loramux.adapter_store.registry.eval_claims import ClaimedEval, EvalClaims
from loramux.adapter_store.registry.evals import PPM, Eval, EvalAnswer
from loramux.engine.protocol.messages import PromptLogprob, StatsRequest
from loramux.engine.scheduling.request_limits import MAX_PROMPT_LOGPROBS
from loramux.platform.admission.database_health import DatabaseTrouble
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.errors import ApiError, PermissionDenied
from loramux.platform.evals.cases import Case, read_cases
from loramux.platform.evals.divergence import mean_divergence
from loramux.platform.evals.graders import Grade, combined, grade_likelihood, grade_text, grade_verdict
from loramux.platform.evals.payer import payer
from loramux.platform.evals.questions import Questions
from loramux.platform.requests.claim_loop import ClaimLoop
from loramux.platform.requests.error_responses import TRANSLATIONS
from loramux.platform.requests.services import GatewayServices
from loramux.platform.telemetry.package_metrics import EvalMetrics

MAX_RUNNING = 2
"""Maximum number of evals that a server runs at once, each of another tenant."""

REST = 4.0
"""How long evals rest after a question while other requests run, as a multiple of the question's duration."""

STATS_TIMEOUT_S = 5.0
MAX_FAILURES_IN_A_ROW = 5
"""Number of consecutive questions without an answer after which an eval fails."""

_FATAL = (401, 403, 404, 409)
"""Statuses that every other question of the eval would get, too."""
_LATER = (429, 503)

ScoresBySide = dict[int, list[PromptLogprob]]
"""The scores of one text, by side."""

T = TypeVar("T")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long an eval waits, in seconds."""

    answer_s: float = 120.0
    """Longest wait for one answer or verdict."""
    refusal_s: float = 600.0
    """Longest time for which one question is refused for lack of quota or capacity. Then the eval fails."""
    retry_s: float = 60.0
    """Longest pause before a refused question is asked again."""
    queue_s: float = 60.0
    """Longest time that a question waits because of other requests."""
    poll_s: float = 1.0
    """Interval between looks for a queued eval."""
    look_s: float = 0.25
    """Interval between looks at the engine's queue."""
    engine_s: float = 30.0
    """Longest time for which one question is refused while this server's engine does not run. Then any server can
    continue the eval.
    """


class EvalFailed(Exception):
    """The eval cannot continue."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EvalRunner:
    """Claims evals and runs them until cancelled. Several servers on one database can run evals concurrently."""

    def __init__(
        self,
        services: GatewayServices,
        claims: EvalClaims,
        metrics: EvalMetrics,
        patience: Patience | None = None,
    ) -> None:
        self._services = services
        self._claims = claims
        self._metrics = metrics
        self._patience = patience or Patience()
        self._num_asking = 0
        self._rests_until_s = 0.0

    async def run(self, draining: asyncio.Event) -> None:
        """Run until cancelled or until `draining` is set. The evals that are running then go back to the queue."""
        loop = ClaimLoop(
            services=self._services,
            claim=self._claims.claim,
            run_one=self._run,
            what="evals",
            max_running=MAX_RUNNING,
            poll_s=self._patience.poll_s,
        )
        await loop.run(draining)

    async def _run(self, claimed: ClaimedEval) -> None:
        found = claimed.eval
        renewal = asyncio.create_task(self._renew(found.id))
        try:
            await self._answer_all(claimed)
            await self._services.call(self._claims.finish, found.id)
        except (EvalFailed, InvalidEval) as error:
            with suppress(ClaimLost):
                await self._services.call(self._claims.fail, found.id, error.code, str(error))
            log.info("an eval failed", eval_id=found.id, code=error.code)
        except ClaimLost:
            log.info("an eval was cancelled or taken over", eval_id=found.id)
        except asyncio.CancelledError:
            # The server stops. Another one, or this one after a restart, continues the eval at once.
            with suppress(ClaimLost, SQLAlchemyError, DatabaseTrouble):
                await self._services.call(self._claims.give_back, found.id)
            raise
        except EngineUnavailable as error:
            log.warning("an eval is given back", eval_id=found.id, reason=str(error))
            with suppress(ClaimLost, SQLAlchemyError, DatabaseTrouble):
                await self._services.call(self._claims.give_back, found.id)
        except (SQLAlchemyError, DatabaseTrouble) as error:
            # The claim expires, and a server continues the eval.
            log.warning("an eval was interrupted", eval_id=found.id, error=type(error).__name__)
        except Exception as error:
            log.exception("an eval failed unexpectedly", eval_id=found.id)
            with suppress(ClaimLost, SQLAlchemyError, DatabaseTrouble):
                await self._services.call(self._claims.fail, found.id, "internal_error", type(error).__name__)
        finally:
            renewal.cancel()

    async def _renew(self, eval_id: str) -> None:
        while True:
            await asyncio.sleep(self._claims.lease_s / 3)
            # A lost claim is noticed when the next answer is stored.
            with suppress(ClaimLost, SQLAlchemyError, DatabaseTrouble):
                await self._services.call(self._claims.renew, eval_id)

    async def _answer_all(self, claimed: ClaimedEval) -> None:
        file = await self._services.compute(read_cases, claimed.content)
        num_failures = 0
        for case in file.cases:
            scores: ScoresBySide = {}
            for side in claimed.eval.sides:
                if (case.line, side) in claimed.answered:
                    continue
                answer, has_failed = await self._answered(claimed.eval, case, side, scores)
                await self._services.call(self._claims.record, claimed.eval.id, answer)
                self._metrics.answers.labels("passed" if answer.is_passed else "failed").inc()
                num_failures = num_failures + 1 if has_failed else 0
                if num_failures == MAX_FAILURES_IN_A_ROW:
                    raise EvalFailed("no_answers", f"{num_failures} lines in a row got no answer: {answer.detail}")

    async def _answered(self, found: Eval, case: Case, side: int, scores: ScoresBySide) -> tuple[EvalAnswer, bool]:
        """Answer and grade one line. Also return whether there was no answer or no verdict.

        The scores of the line's reference are added to `scores`.
        """
        text, has_failed, divergence, why = "", False, None, ""
        try:
            if case.needs_answer:
                text = await self._asked(found, lambda questions: questions.answer(found.model(side), case), side)
            grade = combined(await self._grades(found, case, side, text, scores))
        except (TimeoutError, ApiError) as error:
            grade, has_failed = Grade(0.0, False, self._explained(error)), True
        if found.shared(side) is not None and not has_failed:
            divergence, why = await self._divergence(found, case, text, scores)
        detail = "; ".join(filter(None, (grade.detail, why and f"divergence not measured: {why}")))
        score_ppm = round(grade.score * PPM)
        return EvalAnswer(case.line, side, score_ppm, grade.is_passed, text, detail, divergence), has_failed

    def _explained(self, error: TimeoutError | ApiError) -> str:
        if isinstance(error, ApiError):
            return f"{error.code}: {error.message}"
        return f"no answer within {self._patience.answer_s:g} s"

    async def _divergence(self, found: Eval, case: Case, text: str, scores: ScoresBySide) -> tuple[int | None, str]:
        """Return the divergence that `share_base_cache` causes, or None and why it cannot be measured.

        It is measured on the tokens of the reference, whose `scores` are known, or of the answer without a reference.
        """
        text = text if case.reference is None else case.reference
        model, num_own = found.model(side=1), found.share_base_cache
        # The engine refuses a prompt that fills the context.
        max_tokens = self._services.max_model_len - 1
        try:
            prompt = await self._asked(found, lambda questions: questions.prompt(model, case))
            if num_own is not None and len(prompt) <= num_own:
                return None, f"the adapter computes the whole prompt of {len(prompt)} tokens"
            for side in found.sides:
                if side not in scores:
                    scores[side] = await self._asked(
                        found,
                        lambda questions: questions.scores(model, case, text, MAX_PROMPT_LOGPROBS, max_tokens),
                        side,
                    )
        except (TimeoutError, ApiError) as error:
            return None, self._explained(error)
        nats = await self._services.compute(mean_divergence, scores[0], scores[1])
        return (None, "there is no text to score") if nats is None else (round(nats * PPM), "")

    async def _grades(self, found: Eval, case: Case, side: int, text: str, scores: ScoresBySide) -> list[Grade]:
        grades = await self._services.compute(grade_text, case, text)
        if case.judge is not None and found.judge is not None:
            judge = found.judge
            grades.append(grade_verdict(await self._asked(found, lambda asked: asked.verdict(judge, case, text))))
        if case.reference is not None:
            reference, model = case.reference, found.model(side)
            num_top = 0 if found.share_base_cache is None else MAX_PROMPT_LOGPROBS
            scores[side] = await self._asked(
                found, lambda questions: questions.scores(model, case, reference, num_top), side
            )
            grades.append(grade_likelihood(case, [scored.logprob for scored in scores[side]]))
        return grades

    async def _asked(self, found: Eval, ask: Callable[[Questions], Awaitable[T]], side: int = 0) -> T:
        """Ask until the question is admitted. Raises EvalFailed, TimeoutError, ApiError for this question only, or
        EngineUnavailable if the engine has not run for a while.
        """
        began_s = time.monotonic()
        end_s = began_s + self._patience.refusal_s
        while True:
            questions = await self._questions(found, found.shared(side))
            await self._wait_for_turn()
            try:
                async with asyncio.timeout(self._patience.answer_s), self._asking():
                    return await ask(questions)
            except ApiError as error:
                if error.status in _FATAL:
                    raise EvalFailed(error.code, error.message) from None
                if error.status not in _LATER:
                    raise
                refusal, wait_s = error, error.retry_after_s or 1.0
            except tuple(TRANSLATIONS) as error:
                refusal, wait_s = TRANSLATIONS[_known(error)](error), 1.0
            if not self._services.engine.is_own_ready and time.monotonic() - began_s >= self._patience.engine_s:
                raise EngineUnavailable("the engine does not run")
            if time.monotonic() + wait_s > end_s:
                raise EvalFailed(refusal.code, refusal.message)
            await asyncio.sleep(min(wait_s, self._patience.retry_s))

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        began_s = time.monotonic()
        self._num_asking += 1
        try:
            yield
        finally:
            self._num_asking -= 1
            now_s = time.monotonic()
            self._rests_until_s = max(self._rests_until_s, now_s + REST * (now_s - began_s))

    async def _questions(self, found: Eval, share_base_cache: int | None) -> Questions:
        """Check again that the key and the tenant are in service. Raises EvalFailed."""
        callers = self._services.callers
        tenant = await self._services.call(callers.tenants.get, found.tenant_id)
        if tenant is None or tenant.state != "active":
            raise EvalFailed("tenant_suspended", "the tenant is not in service")
        key = None
        if found.api_key_id is not None:
            key = await self._services.call(callers.api_keys.get, found.api_key_id)
            if key is None:
                raise EvalFailed("insufficient_scope", "the key that started the eval is gone")
        try:
            principal = payer(tenant.id, tenant.slug, key, self._services.database.now_us())
        except PermissionDenied as error:
            raise EvalFailed(error.code, error.message) from None
        return Questions(self._services, principal, is_charged=key is not None, share_base_cache=share_base_cache)

    async def _wait_for_turn(self) -> None:
        """Wait until no other request waits for the engine, and rest while others run, but not forever."""
        end_s = time.monotonic() + self._patience.queue_s
        while time.monotonic() < end_s:
            try:
                stats = await self._services.engine.call(StatsRequest(), STATS_TIMEOUT_S)
            except (EngineUnavailable, TimeoutError):
                return
            has_rested = time.monotonic() >= self._rests_until_s
            # An eval goes before the lines of batches.
            num_waiting = stats.num_waiting - stats.num_background_waiting
            num_running = stats.num_running - stats.num_background_running
            if num_waiting == 0 and (has_rested or num_running <= self._num_asking):
                return
            await asyncio.sleep(self._patience.look_s)


def _known(error: Exception) -> type[Exception]:
    return next(kind for kind in type(error).__mro__ if kind in TRANSLATIONS)
