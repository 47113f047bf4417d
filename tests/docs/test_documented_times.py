"""The times and limits that pages promise are those of the program."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from loramux.adapter_store.ingest import purged_blobs, upload_rows, version_processor
from loramux.adapter_store.sandbox import lanes
from loramux.adapter_store.tiers import staging_link
from loramux.admin.console.oidc import role_confirmation
from loramux.admin.console.sessions import sessions
from loramux.admin.rest import purging
from loramux.admin.rest.adapters import events, uploads
from loramux.admin.server import bounded_connection, transfer_slots
from loramux.admin.serving import event_upkeep
from loramux.engine.chat_templates import jinja_sandbox
from loramux.migrations.database import LONGEST_READ_S
from loramux.platform.accounts import alias_overflows, change_watch, tenants
from loramux.platform.batches import batch_rows, room
from loramux.platform.evals.runner import Patience
from loramux.platform.events import event_log, webhook_runner, webhook_sender, webhooks
from loramux.platform.replicas import certificates, replica_book
from loramux.platform.responses_api import background
from loramux.platform.stored_responses import background_store
from tests.docs.write import DOCS

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
SECOND_US = 1_000_000
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True)
class Promise:
    page: str
    sentence: str
    """A part of the page, with `{}` in the place of each number."""
    values: tuple[float, ...]
    is_in_words: bool = False
    """The page writes "ten minutes"."""

    def text(self) -> str:
        return self.sentence.format(
            *(WORDS[round(value)] if self.is_in_words else f"{value:,g}" for value in self.values)
        )


PATIENCE = Patience()
PAUSES_S = webhook_runner.PAUSES_S
PROMISES = (
    Promise("batches.md", "begin up to {} s later", (room.YIELD_S,)),
    Promise("batches.md", "After {} hours, the batch expires", (batch_rows.WINDOW_US / HOUR_S / SECOND_US,)),
    Promise("clients.md", "each event for {} hours", (background_store.EVENTS_KEPT_US / HOUR_S / SECOND_US,)),
    Promise("clients.md", "groups, up to {} times a second", (1 / background.FLUSH_S,), is_in_words=True),
    Promise("console.md", "A session ends after {} hours", (sessions.LIFETIME_S / HOUR_S,)),
    Promise("console.md", "or after {} hour of inactivity", (sessions.IDLE_S / HOUR_S,), is_in_words=True),
    Promise("evals.md", "Each question waits at most {} seconds", (PATIENCE.queue_s,)),
    Promise("evals.md", "engine does not run for {} seconds", (PATIENCE.engine_s,)),
    Promise("evals.md", "is asked again for up to {} minutes", (PATIENCE.refusal_s / MINUTE_S,), is_in_words=True),
    Promise("evals.md", "or a verdict may take {} minutes", (PATIENCE.answer_s / MINUTE_S,), is_in_words=True),
    Promise("events.md", "or month, within {} seconds", (event_upkeep.BUDGET_INTERVAL_S,), is_in_words=True),
    Promise("events.md", "reported within {} seconds", (event_upkeep.ENGINE_INTERVAL_S,), is_in_words=True),
    Promise("events.md", "at most {} of each tenant", (event_log.MAX_KEPT,)),
    Promise("events.md", "ends after {} minutes", (events.LIFETIME_S / MINUTE_S,), is_in_words=True),
    Promise("events.md", "is a heartbeat, every {} s", (events.HEARTBEAT_S,)),
    Promise("events.md", "within {} s counts as delivered", (webhook_sender.DEADLINE_S,)),
    Promise(
        "events.md",
        "sent again after {} s, {} s, {}, {} and {} minutes, {} hour, and then every {} hours",
        (
            *PAUSES_S[:2],
            *(pause_s / MINUTE_S for pause_s in PAUSES_S[2:5]),
            *(pause_s / HOUR_S for pause_s in PAUSES_S[5:]),
        ),
    ),
    Promise("operations.md", "has not changed for {} s gets no requests", (replica_book.GONE_S,)),
    Promise("operations.md", "is deleted after {} minutes", (replica_book.FORGOTTEN_S / MINUTE_S,)),
    Promise("operations.md", "certificates ({} hours)", (certificates.LIFETIME_S / HOUR_S,)),
    Promise("operations.md", "differ by up to {} hours are tolerated", (certificates.LIFETIME_S / 2 / HOUR_S,)),
    Promise(
        "operations.md",
        "does not answer for {} seconds while the engine waits",
        (staging_link.SILENCE_S,),
        is_in_words=True,
    ),
    Promise(
        "operations.md",
        "server of that base has done so within {} minutes",
        (upload_rows.OTHER_BASE_WAIT_US / MINUTE_S / SECOND_US,),
    ),
    Promise(
        "operations.md",
        "that key or tenant within {} seconds",
        (change_watch.MAX_STALE_US / SECOND_US,),
        is_in_words=True,
    ),
    Promise(
        "operations.md",
        "They take effect within {} minutes",
        (change_watch.MAX_AGE_US / MINUTE_S / SECOND_US,),
        is_in_words=True,
    ),
    Promise("operations.md", "still running after {} seconds", (purging.WAIT_S,), is_in_words=True),
    Promise("operations.md", "for up to {} days. After", (purged_blobs.KEPT_US / DAY_S / SECOND_US,)),
    Promise(
        "operations.md",
        "for up to {} days after the purge of a tenant",
        (tenants.FORGOTTEN_US / DAY_S / SECOND_US,),
        is_in_words=True,
    ),
    Promise("operations.md", "due more than {} hours later", (webhooks.MAX_PAUSE_S / HOUR_S,), is_in_words=True),
    Promise(
        "operations.md", "query of a report or a filtered list took the database longer than {} s", (LONGEST_READ_S,)
    ),
    Promise("security.md", "in a sandboxed process, with {} s and", (jinja_sandbox.MAX_RENDER_S,)),
    Promise("security.md", "half after {} seconds", (lanes.HALF_LIFE_S,), is_in_words=True),
    Promise("security.md", "after {} seconds. After a burst", (transfer_slots.WAIT_S,), is_in_words=True),
    Promise(
        "security.md",
        "query of a report or a filtered list that takes the database longer than {} seconds",
        (LONGEST_READ_S,),
    ),
    Promise("security.md", "A request head must arrive within {} s", (bounded_connection.HEAD_TIMEOUT_S,)),
    Promise(
        "security.md",
        "a file of an adapter within {} s, with no pause longer than {} s",
        (uploads.UPLOAD_TIMEOUT_S, uploads.CHUNK_TIMEOUT_S),
    ),
    Promise("security.md", "valid for {} hours", (certificates.LIFETIME_S / HOUR_S,)),
    Promise("service-tiers.md", "heed a change within {} seconds", (alias_overflows.MAX_STALE_S,), is_in_words=True),
    Promise(
        "single-sign-on.md",
        "confirms the user's roles every {} minutes",
        (role_confirmation.CONFIRMED_S / MINUTE_S,),
        is_in_words=True,
    ),
    Promise("single-sign-on.md", "until they are {} minutes old", (role_confirmation.UNCONFIRMED_S / MINUTE_S,)),
    Promise("adapters.md", "unavailable source every {} seconds", (version_processor.SOURCE_RETRY_S,)),
)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: f"{promise.page}: {promise.sentence}")
def test_promised_time_is_the_programs(promise: Promise) -> None:
    assert promise.text() in " ".join((DOCS / promise.page).read_text().split())
