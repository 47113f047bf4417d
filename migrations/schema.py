"""All tables. Times are microseconds since 1970 (UTC), amounts are integers, and JSON columns stay small."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

ID = String(40)
NAME = String(63)


def _partial_index(where: str, name: str, *columns: str) -> Index:
    """Return an index of the rows that meet the condition `where`, on both databases."""
    return Index(name, *columns, postgresql_where=text(where), sqlite_where=text(where))


tenants = Table(
    "tenants",
    metadata,
    Column("id", ID, primary_key=True),
    Column("slug", NAME, nullable=False, unique=True),
    Column("display_name", String(200), nullable=False),
    Column("state", String(16), nullable=False),
    Column("weight", Integer, nullable=False),
    # IANA name of the timezone in which the tenant's days and months begin.
    Column("timezone", String(64), nullable=False, server_default="UTC"),
    # Bytes of host memory that the tenant's adapters keep when other tenants' adapters are loaded.
    Column("host_floor_bytes", BigInteger, nullable=False, server_default="0"),
    # Number of days for which responses and chat completions are stored. 0 if they are not stored.
    Column("response_days", Integer, nullable=False, server_default="0"),
    # The best service tier of the tenant's requests, and the tier of those that name none.
    Column("max_service_tier", String(16), nullable=False, server_default="default"),
    Column("default_service_tier", String(16), nullable=False, server_default="default"),
    # Secret from which the tenant's prefix-cache namespace is derived, so that two tenants never share KV pages.
    Column("isolation_secret", LargeBinary(32), nullable=False),
    Column("created_us", BigInteger, nullable=False),
    CheckConstraint("state IN ('active', 'suspended')", name="state"),
)

# Responses of `/v1/responses` that a tenant keeps.
responses = Table(
    "responses",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False, index=True),
    # The adapter that answered. NULL for the base.
    Column("adapter_id", ID, nullable=True),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False, index=True),
    # The response and its input, encrypted.
    Column("content", LargeBinary, nullable=False),
    # NULL unless the response was made in the background.
    Column("background_state", String(16), nullable=True),
    # Number of stored events. NULL if the response's events are not stored.
    Column("num_events", Integer, nullable=True),
    _partial_index(
        "background_state IN ('queued', 'in_progress', 'cancelling')", "ix_responses_unfinished", "tenant_id"
    ),
)

# The events of the streams of responses in the background. A row has several consecutive events.
response_events = Table(
    "response_events",
    metadata,
    Column("response_id", ID, ForeignKey("responses.id", ondelete="CASCADE"), primary_key=True),
    # The sequence numbers are those from `first_sequence` to before `end_sequence`.
    Column("end_sequence", Integer, primary_key=True),
    Column("first_sequence", Integer, nullable=False),
    Column("expires_us", BigInteger, nullable=False, index=True),
    # The events, encrypted.
    Column("content", LargeBinary, nullable=False),
)

# Conversations of `/v1/conversations`.
conversations = Table(
    "conversations",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False, index=True),
    # The adapters that have answered in the conversation. null stands for the base.
    Column("adapter_ids", JSON, nullable=False),
    Column("num_items", Integer, nullable=False),
    # Length of the metadata and the items before they were compressed and encrypted.
    Column("num_bytes", BigInteger, nullable=False),
    Column("next_position", Integer, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False, index=True),
    # Encrypted.
    Column("metadata", LargeBinary, nullable=False),
)

conversation_items = Table(
    "conversation_items",
    metadata,
    Column("conversation_id", ID, ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True),
    # A keyed hash of the item's ID.
    Column("item_key", String(32), nullable=False),
    Column("num_bytes", Integer, nullable=False),
    # The item, encrypted.
    Column("content", LargeBinary, nullable=False),
    UniqueConstraint("conversation_id", "item_key"),
)

# Chat completions that a tenant keeps.
chat_completions = Table(
    "chat_completions",
    metadata,
    Column("id", String(48), primary_key=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False),
    # The adapter that answered. NULL for the base.
    Column("adapter_id", ID, nullable=True),
    Column("model", String(200), nullable=False),
    # A keyed hash of each entry of the metadata, separated by spaces.
    Column("metadata_tags", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False, index=True),
    # The chat completion and the messages of its request, encrypted.
    Column("completion", LargeBinary, nullable=False),
    Column("messages", LargeBinary, nullable=False),
    # Length of the chat completion before it was compressed and encrypted.
    Column("num_bytes", BigInteger, nullable=False),
    Index("ix_chat_completions_tenant_id_id", "tenant_id", "id"),
)

# The number of bytes of a tenant's responses, chat completions and conversations. Triggers keep it.
stored_bytes = Table(
    "stored_bytes",
    metadata,
    Column("tenant_id", ID, ForeignKey("tenants.id"), primary_key=True),
    Column("num_bytes", BigInteger, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", ID, primary_key=True),
    # A platform administrator's key belongs to no tenant.
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=True),
    Column("public_id", String(16), nullable=False, unique=True),
    Column("secret_sha256", LargeBinary(32), nullable=False),
    Column("name", String(200), nullable=False),
    Column("scopes", JSON, nullable=False),
    # Identifiers of the adapters that the key may name. NULL for all adapters that its tenant may call.
    Column("adapter_ids", JSON(none_as_null=True), nullable=True),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=True),
    Column("revoked_us", BigInteger, nullable=True),
    # The secret before the last rotation, the end of its validity, and the time of the rotation.
    Column("previous_sha256", LargeBinary(32), nullable=True),
    Column("previous_until_us", BigInteger, nullable=True),
    Column("rotated_us", BigInteger, nullable=True),
    # The key's own service tiers. NULL for those of its tenant.
    Column("max_service_tier", String(16), nullable=True),
    Column("default_service_tier", String(16), nullable=True),
    Index("ix_api_keys_tenant_id_id", "tenant_id", "id"),
)

adapters = Table(
    "adapters",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False),
    Column("name", NAME, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    # A disabled adapter serves no new requests, but no data is deleted.
    Column("disabled_us", BigInteger, nullable=True),
    UniqueConstraint("tenant_id", "name"),
    Index("ix_adapters_tenant_id_id", "tenant_id", "id"),
)

adapter_versions = Table(
    "adapter_versions",
    metadata,
    Column("id", ID, primary_key=True),
    Column("adapter_id", ID, ForeignKey("adapters.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    # SHA-256 of the canonical file, hexadecimal. Set once validation has passed.
    Column("digest", String(64), nullable=True, index=True),
    # SHA-256 of `digest` and the checksums of the version's rows in adapter_version_files. NULL without such rows.
    Column("version_digest", String(64), nullable=True),
    Column("max_rank", Integer, nullable=True),
    Column("num_pages", Integer, nullable=True),
    # The token ids that activate the adapter; NULL if it is always active.
    Column("invocation_tokens", JSON(none_as_null=True), nullable=True),
    # What the adapter was trained for, other than generation: classes with their labels, or embeddings.
    Column("task", JSON(none_as_null=True), nullable=True),
    Column("canonical_bytes", BigInteger, nullable=True),
    Column("upload_id", ID, nullable=False),
    # SHA-256 of the uploaded files' checksums. Uploads of identical files to an adapter become one version, unless it
    # was rejected.
    Column("files_sha256", String(64), nullable=True),
    # The server that is validating the version, and when its claim expires.
    Column("claimed_by", ID, nullable=True),
    Column("claim_expires_us", BigInteger, nullable=True),
    # The findings of validation: properties, checks and warnings, or the error with its code and parameter.
    Column("report", JSON, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("ready_us", BigInteger, nullable=True),
    # When an operator pinned the version in the page pool.
    Column("pinned_us", BigInteger, nullable=True),
    # The base of the server that received the version. Servers of this base validate the upload first. NULL if
    # servers of any base may validate it first.
    Column("base_id", String(64), nullable=True),
    UniqueConstraint("adapter_id", "number"),
    Index("ix_adapter_versions_adapter_id_id", "adapter_id", "id"),
    # Covers only the few pinned versions.
    _partial_index("pinned_us IS NOT NULL", "ix_adapter_versions_pinned", "pinned_us"),
    Index("ix_adapter_versions_adapter_id_files", "adapter_id", "files_sha256"),
    # On PostgreSQL, this covers only the few unfinished versions. An index on all versions would mislead PostgreSQL
    # while it has no statistics.
    Index("ix_adapter_versions_state_id", "state", "id", postgresql_where=text("state IN ('pending', 'validating')")),
    CheckConstraint("state IN ('pending', 'validating', 'ready', 'rejected', 'quarantined', 'archived')", name="state"),
)

# The base models that servers on this database serve, or have served.
bases = Table(
    "bases",
    metadata,
    # SHA-256 of the configuration, the tokenizer and a sample of the weights, hexadecimal.
    Column("id", String(64), primary_key=True),
    Column("served_name", String(200), nullable=False),
    Column("created_us", BigInteger, nullable=False),
    # SHA-256 of the tokenizer and chat templates, hexadecimal. NULL in older rows until a server registers the base.
    Column("prompt_sha256", String(64), nullable=True),
    # The base's share of the requests, out of the sum of all weights. NULL if its servers run only their own requests.
    Column("weight", Integer, nullable=True),
)

# The running servers of each base. A server deletes its row when it stops. After a crash, `seen_us` no longer changes.
base_servers = Table(
    "base_servers",
    metadata,
    Column("id", ID, primary_key=True),
    Column("base_id", String(64), ForeignKey("bases.id"), nullable=False),
    # HOST:PORT, for operators.
    Column("address", String(300), nullable=False),
    Column("state", String(16), nullable=False),
    # When the server last reported.
    Column("seen_us", BigInteger, nullable=False),
    CheckConstraint("state IN ('serving', 'draining')", name="state"),
)

# The validation of each version for each base. If a row is missing, the version is waiting for a server of that base.
version_bases = Table(
    "version_bases",
    metadata,
    Column("version_id", ID, ForeignKey("adapter_versions.id"), primary_key=True),
    Column("base_id", String(64), ForeignKey("bases.id"), primary_key=True),
    Column("state", String(16), nullable=False),
    # The server that is validating the version, and when its claim expires.
    Column("claimed_by", ID, nullable=True),
    Column("claim_expires_us", BigInteger, nullable=True),
    # Why the version was rejected.
    Column("code", String(64), nullable=True),
    Column("message", String(1000), nullable=True),
    # When the verdict was recorded.
    Column("checked_us", BigInteger, nullable=True),
    Index("ix_version_bases_base_id_state", "base_id", "state", "version_id"),
    CheckConstraint("state IN ('validating', 'ready', 'rejected')", name="state"),
)

# A version's optional files, such as its chat template. They are written in the transaction that records the digest.
adapter_version_files = Table(
    "adapter_version_files",
    metadata,
    Column("version_id", ID, ForeignKey("adapter_versions.id"), primary_key=True),
    Column("name", NAME, primary_key=True),
    Column("size", Integer, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("content", LargeBinary, nullable=False),
)

adapter_aliases = Table(
    "adapter_aliases",
    metadata,
    Column("adapter_id", ID, ForeignKey("adapters.id"), primary_key=True),
    Column("name", NAME, primary_key=True),
    # Number of changes to the alias. The history has a row for each change.
    Column("revision", Integer, nullable=False),
    Column("updated_us", BigInteger, nullable=False),
    # {"sha256", "name", "min_ppm", "judge"}, without "judge" if there is none: the eval that a version must have passed
    # before the alias moves to it. NULL if the alias demands none.
    Column("required_eval", JSON(none_as_null=True), nullable=True),
    # The bounds within which the alias's new versions must stay, and the verdict: see CanaryRule in
    # adapter_store/registry/records.py. NULL if the alias does not watch its versions.
    Column("canary", JSON(none_as_null=True), nullable=True),
    # The model that answers when the alias cannot, as `tenant/adapter`, with a version or an alias, or a served base.
    # NULL if none does.
    Column("overflow", String(200), nullable=True),
    # Number of each prompt's last tokens that the adapter computes. The base computes the tokens before. NULL if the
    # adapter computes whole prompts.
    Column("share_base_cache", Integer, nullable=True),
    # Covers only the few aliases with a canary.
    _partial_index("canary IS NOT NULL", "ix_adapter_aliases_canary", "updated_us"),
    # Covers only the few aliases with an overflow, which gateways read together.
    _partial_index("overflow IS NOT NULL", "ix_adapter_aliases_overflow", "adapter_id"),
)

adapter_alias_targets = Table(
    "adapter_alias_targets",
    metadata,
    Column("adapter_id", ID, primary_key=True),
    Column("name", NAME, primary_key=True),
    Column("version_id", ID, ForeignKey("adapter_versions.id"), primary_key=True, index=True),
    # The version's share of the requests, out of the sum of the alias's weights.
    Column("weight", Integer, nullable=False),
    ForeignKeyConstraint(["adapter_id", "name"], ["adapter_aliases.adapter_id", "adapter_aliases.name"]),
    CheckConstraint("weight > 0", name="weight"),
)

adapter_alias_history = Table(
    "adapter_alias_history",
    metadata,
    Column("id", ID, primary_key=True),
    Column("adapter_id", ID, ForeignKey("adapters.id"), nullable=False),
    Column("name", NAME, nullable=False),
    Column("revision", Integer, nullable=False),
    # Author of the change: a key's ID, "operator", a single sign-on user (`oidc_...`), or "system".
    Column("actor", ID, nullable=False),
    Column("action", String(16), nullable=False),
    # [{"version_id", "number", "weight"}]: the alias's targets as of this revision.
    Column("targets", JSON, nullable=False),
    # The alias's `share_base_cache` as of this revision.
    Column("share_base_cache", Integer, nullable=True),
    Column("created_us", BigInteger, nullable=False),
    UniqueConstraint("adapter_id", "name", "revision"),
    CheckConstraint("action IN ('set', 'rollback')", name="action"),
)

# Runs of a version on a file of prompts with expected answers, and their results.
evals = Table(
    "evals",
    metadata,
    Column("id", ID, primary_key=True),
    Column("version_id", ID, ForeignKey("adapter_versions.id"), nullable=False),
    # The version that answers the same prompts for comparison: another version of the adapter or, with
    # `share_base_cache`, the same one. NULL without a comparison.
    Column("compared_id", ID, ForeignKey("adapter_versions.id"), nullable=True, index=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False),
    # The file's name, or a name made from its checksum if the name could be a secret.
    Column("name", String(100), nullable=False),
    Column("sha256", String(64), nullable=False),
    # The model that judges answers. NULL if no line of the file needs a judge.
    Column("judge", String(256), nullable=True),
    Column("state", String(16), nullable=False),
    # The file while the eval is queued or running, then empty.
    Column("content", LargeBinary, nullable=False),
    Column("num_cases", Integer, nullable=False),
    # Number of stored answers, of both versions.
    Column("num_answers", Integer, nullable=False),
    # Mean scores in millionths and numbers of passed cases. NULL until the eval is done.
    Column("score_ppm", Integer, nullable=True),
    Column("num_passed", Integer, nullable=True),
    Column("compared_ppm", Integer, nullable=True),
    Column("compared_passed", Integer, nullable=True),
    # The alias's option of this name with which the compared version answers. NULL without it.
    Column("share_base_cache", Integer, nullable=True),
    # Mean KL divergence that the option causes, in millionths of a nat per token. NULL until it is measured.
    Column("divergence_ppm", BigInteger, nullable=True),
    # Number of lines whose divergence has been measured. NULL without the option and until the eval ends.
    Column("num_measured", Integer, nullable=True),
    # The tenant's key that pays for the answers. NULL if the operator runs the eval, which is not charged.
    Column("api_key_id", ID, nullable=True),
    Column("created_by", ID, nullable=False),
    Column("error_code", String(64), nullable=True),
    Column("error", String(500), nullable=True),
    # The server that runs the eval, and when its claim expires.
    Column("claimed_by", ID, nullable=True),
    Column("claim_expires_us", BigInteger, nullable=True),
    Column("created_us", BigInteger, nullable=False),
    Column("finished_us", BigInteger, nullable=True),
    Index("ix_evals_version_id_id", "version_id", "id"),
    Index("ix_evals_state_id", "state", "id", postgresql_where=text("state IN ('queued', 'running')")),
    CheckConstraint("state IN ('queued', 'running', 'done', 'failed', 'cancelled')", name="state"),
)

eval_answers = Table(
    "eval_answers",
    metadata,
    Column("eval_id", ID, ForeignKey("evals.id"), primary_key=True),
    # The case's line in the file, from 1.
    Column("line", Integer, primary_key=True),
    # 0 for the evaluated version, 1 for the version that it is compared with.
    Column("side", SmallInteger, primary_key=True),
    Column("score_ppm", Integer, nullable=False),
    Column("is_passed", SmallInteger, nullable=False),
    # The answer, cut to its first characters, and why it did not pass.
    Column("answer", String(1000), nullable=False),
    Column("detail", String(300), nullable=False),
    # The answer's KL divergence: see `evals.divergence_ppm`.
    Column("divergence_ppm", BigInteger, nullable=True),
)

# Files of a tenant, for batches. Their contents are blobs at `files/TENANT/FILE`.
files = Table(
    "files",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False),
    # The key that uploaded the file, or that started the batch that wrote it.
    Column("api_key_id", ID, nullable=False),
    Column("purpose", String(20), nullable=False),
    Column("name", String(255), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    # A file is visible only while it is ready. Its row exists before its blob, and until its blob has been deleted.
    Column("state", String(16), nullable=False),
    Column("created_us", BigInteger, nullable=False),
    # When the file is deleted. NULL if it is kept.
    Column("expires_us", BigInteger, nullable=True),
    Index("ix_files_tenant_id_id", "tenant_id", "id"),
    Index("ix_files_state_created", "state", "created_us", postgresql_where=text("state != 'ready'")),
    _partial_index("expires_us IS NOT NULL", "ix_files_expires", "expires_us"),
    CheckConstraint("state IN ('uploading', 'ready', 'deleting')", name="state"),
    CheckConstraint("purpose IN ('batch', 'batch_output')", name="purpose"),
)

# Purged tenants, until the blobs of their files are deleted.
file_purges = Table(
    "file_purges",
    metadata,
    # Not a foreign key, because the tenant does not exist any more.
    Column("tenant_id", ID, primary_key=True),
    Column("purged_us", BigInteger, nullable=False),
)

# The prefix-cache namespaces of deleted tenants, until every server has deleted their pages.
prefix_purges = Table(
    "prefix_purges",
    metadata,
    Column("isolation_key", LargeBinary(32), primary_key=True),
    Column("expires_us", BigInteger, nullable=False, index=True),
)

# Files of requests that run when the engine has room.
batches = Table(
    "batches",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False),
    # The key that pays for the requests.
    Column("api_key_id", ID, nullable=False),
    Column("endpoint", String(40), nullable=False),
    # Not references, because files can be deleted before their batch.
    Column("input_file_id", ID, nullable=False),
    Column("output_file_id", ID, nullable=True),
    Column("error_file_id", ID, nullable=True),
    # OpenAI's metadata, and the lifetime of the output files: see OUTPUT_LIFETIME in platform/batches/batch_rows.py.
    Column("labels", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    # [{"code", "message", "param", "line"}]: why the batch failed.
    Column("errors", JSON, nullable=False),
    Column("num_lines", Integer, nullable=False),
    Column("num_completed", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    # The server that runs the batch, and when its claim expires.
    Column("claimed_by", ID, nullable=True),
    Column("claim_expires_us", BigInteger, nullable=True),
    Column("created_us", BigInteger, nullable=False),
    # When the requests that have not run fail.
    Column("expires_us", BigInteger, nullable=False),
    # When the batch reached each state. NULL if it has not.
    Column("in_progress_us", BigInteger, nullable=True),
    Column("finalizing_us", BigInteger, nullable=True),
    Column("cancelling_us", BigInteger, nullable=True),
    Column("finished_us", BigInteger, nullable=True),
    Index("ix_batches_tenant_id_id", "tenant_id", "id"),
    Index(
        "ix_batches_state_id",
        "state",
        "id",
        postgresql_where=text("state IN ('validating', 'in_progress', 'finalizing', 'cancelling')"),
    ),
    CheckConstraint(
        "state IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'completed', 'failed', 'expired', "
        "'cancelled')",
        name="state",
    ),
)

# The requests of an unfinished batch. They are deleted when its output file has been written.
batch_lines = Table(
    "batch_lines",
    metadata,
    Column("batch_id", ID, ForeignKey("batches.id"), primary_key=True),
    # The line in the input file, from 1, and where it begins in the file.
    Column("line", Integer, primary_key=True),
    Column("start", BigInteger, nullable=False),
    Column("num_bytes", Integer, nullable=False),
    # The model as the request names it. Requests run in the order of their models.
    Column("model", String(256), nullable=False),
    # The last request that was reserved for the line. NULL if there has been none.
    Column("request_id", ID, nullable=True),
    # The HTTP status of the answer. NULL until there is one.
    Column("status", SmallInteger, nullable=True),
    # The answer as the line of the output or error file.
    Column("answer", LargeBinary, nullable=True),
    # The usage to settle the request with, if the server stops between storing the answer and settling.
    Column("usage", JSON(none_as_null=True), nullable=True),
    Index("ix_batch_lines_waiting", "batch_id", "status", "model", "line"),
)

adapter_grants = Table(
    "adapter_grants",
    metadata,
    Column("adapter_id", ID, ForeignKey("adapters.id"), primary_key=True),
    # The tenant that may call the adapter. It pays for its own calls.
    Column("tenant_id", ID, ForeignKey("tenants.id"), primary_key=True, index=True),
    Column("created_us", BigInteger, nullable=False),
)

uploads = Table(
    "uploads",
    metadata,
    Column("id", ID, primary_key=True),
    Column("adapter_id", ID, ForeignKey("adapters.id"), nullable=False),
    # [{"name", "size", "sha256"}], as the client declared them.
    Column("files", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    # The bucket or Hugging Face repository from which a server fetches the files. NULL if a client uploads them.
    Column("source_url", String(1200), nullable=True),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False),
    Index("ix_uploads_state_expires", "state", "expires_us"),
    CheckConstraint("state IN ('open', 'used')", name="state"),
)

# The highest version number that an adapter's name had when versions were purged. A new version or a new adapter of
# that name continues the numbers, so that a model name never stands for other weights than before.
retired_numbers = Table(
    "retired_numbers",
    metadata,
    # `tenant/adapter`. Not a reference, because it outlives both.
    Column("model", String(127), primary_key=True),
    Column("last_number", Integer, nullable=False),
)

# Purged weights, until every server has deleted its copies.
purges = Table(
    "purges",
    metadata,
    # A digest of weights, or the identifier of a version.
    Column("id", String(64), primary_key=True),
    Column("kind", String(8), nullable=False),
    # While the blobs of a digest are being deleted, no version with the same weights is accepted.
    Column("state", String(8), nullable=False),
    Column("purged_us", BigInteger, nullable=False),
    # When the blobs are deleted once more, because a server that was writing one at the time may have finished later.
    # NULL once that is done.
    Column("due_us", BigInteger, nullable=True),
    CheckConstraint("kind IN ('digest', 'version')", name="kind"),
    CheckConstraint("state IN ('deleting', 'deleted')", name="state"),
)

quota_policies = Table(
    "quota_policies",
    metadata,
    Column("id", ID, primary_key=True),
    Column("scope", String(16), nullable=False),
    # The limited tenant, key or adapter, or "platform" for all tenants without a policy of their own.
    Column("subject_id", ID, nullable=False),
    # The subject's tenant, whose timezone determines when budgets roll over. NULL for platform policies.
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=True),
    Column("metric", String(40), nullable=False),
    Column("mode", String(8), nullable=False),
    Column("limit_value", BigInteger, nullable=False),
    Column("burst", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("updated_us", BigInteger, nullable=False),
    UniqueConstraint("subject_id", "metric"),
    Index("ix_quota_policies_tenant_id_id", "tenant_id", "id"),
    CheckConstraint("limit_value >= 0 AND burst >= 0", name="amounts"),
    CheckConstraint("scope IN ('platform', 'tenant', 'key', 'adapter')", name="scope"),
    CheckConstraint("mode IN ('hard', 'soft', 'shadow')", name="mode"),
)

quota_counters = Table(
    "quota_counters",
    metadata,
    Column("policy_id", ID, ForeignKey("quota_policies.id"), primary_key=True),
    # The calling tenant, for platform policies and for adapters granted by another tenant, so that each tenant is
    # counted separately. Otherwise the policy's subject.
    Column("subject_id", ID, primary_key=True),
    # Start of a budget's day or month. 0 for buckets and concurrency, which have no window.
    Column("window_start_us", BigInteger, primary_key=True),
    # For buckets, the level in sixty-millionths of a request, token or load, so that refills are exact. A settlement
    # can make it negative.
    Column("level", BigInteger, nullable=False),
    Column("reserved", BigInteger, nullable=False),
    # For budgets, the usage of settled requests in this window.
    Column("used", BigInteger, nullable=False),
    # Number of times that a soft or shadow policy admitted or extended a request that a hard policy would have refused.
    Column("exceeded", BigInteger, nullable=False),
    Column("refilled_us", BigInteger, nullable=False),
    # When the event was written that this budget is nearly used up. NULL if it has not been written in this window.
    Column("announced_us", BigInteger, nullable=True),
    # Serves the question, every few seconds, which budgets of the present day or month are nearly used up.
    _partial_index("announced_us IS NULL", "ix_quota_counters_unannounced", "window_start_us"),
)

# Running requests, and recovered requests that can still be corrected. Settled requests are in usage_events.
reservations = Table(
    "reservations",
    metadata,
    # The request's ID. Each request has one reservation.
    Column("id", ID, primary_key=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False),
    Column("api_key_id", ID, ForeignKey("api_keys.id"), nullable=False),
    Column("adapter_version_id", ID, nullable=True),
    Column("model", String(200), nullable=False),
    Column("endpoint", String(40), nullable=False),
    # For `base` and `end_user`, see usage_events.
    Column("base", String(200), nullable=False, server_default=""),
    Column("end_user", String(128), nullable=True),
    Column("service_tier", String(16), nullable=False, server_default="default"),
    Column("state", String(16), nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("reserved_tokens", BigInteger, nullable=False),
    # [{"policy_id", "window_start_us", "amount"}]: settlement touches exactly these counters.
    Column("charges", JSON, nullable=False),
    Column("checkpoint_tokens", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("lease_expires_us", BigInteger, nullable=False),
    # When cancellation was requested. The gateway reads this column at each checkpoint.
    Column("cancel_requested_us", BigInteger, nullable=True),
    Index("ix_reservations_state_lease", "state", "lease_expires_us"),
    # `settled` is no longer used.
    CheckConstraint("state IN ('open', 'settled', 'recovered')", name="state"),
)

usage_events = Table(
    "usage_events",
    metadata,
    # The request's ID. The ledger contains each request once.
    Column("request_id", ID, primary_key=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False),
    Column("api_key_id", ID, nullable=False),
    Column("adapter_id", ID, nullable=True),
    Column("adapter_version_id", ID, nullable=True),
    # `tenant/adapter@version`, or the served base's name.
    Column("model", String(200), nullable=False),
    Column("endpoint", String(40), nullable=False),
    Column("status", String(16), nullable=False),
    Column("service_tier", String(16), nullable=False, server_default="default"),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("started_us", BigInteger, nullable=False),
    Column("finished_us", BigInteger, nullable=False),
    Column("first_token_us", BigInteger, nullable=True),
    # The served base that the request ran on. "" in rows older than the column.
    Column("base", String(200), nullable=False, server_default=""),
    # The end user that the client named in `user`. For a long or unprintable name, its SHA-256.
    Column("end_user", String(128), nullable=True),
    # The cost at the price in force at admission, rounded up once to a whole billionth of the currency. 0 without a
    # price.
    Column("cost_nanos", BigInteger, nullable=False, server_default="0"),
    Column("price_id", ID, nullable=True),
    # The transaction that wrote the event. Its row in usage_batches is deleted when the rollups include the event.
    Column("batch_id", BigInteger, nullable=False, server_default="0"),
    Index("ix_usage_events_tenant_finished", "tenant_id", "finished_us"),
    Index("ix_usage_events_finished", "finished_us"),
    # Lets a query read one page of a tenant's requests without reading the tenant's other requests.
    Index("ix_usage_events_tenant_request", "tenant_id", "request_id"),
)

usage_adjustments = Table(
    "usage_adjustments",
    metadata,
    Column("id", ID, primary_key=True),
    # At most one correction per request, written if a gateway settles a request that has already been recovered
    # because the gateway seemed dead.
    Column("request_id", ID, ForeignKey("usage_events.request_id"), nullable=False, unique=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False),
    # Correction to the event's tokens. Negative if the request used fewer tokens.
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("cost_nanos", BigInteger, nullable=False, server_default="0"),
    Column("batch_id", BigInteger, nullable=False, server_default="0"),
    Index("ix_usage_adjustments_tenant_created", "tenant_id", "created_us"),
    Index("ix_usage_adjustments_created", "created_us"),
)

usage_batches = Table(
    "usage_batches",
    metadata,
    # A random number. Each transaction that wrote events or adjustments has one row until the rollups include them.
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    # `finished_us` of all the transaction's events, and `created_us` of all its adjustments.
    Column("at_us", BigInteger, nullable=False),
)

# Properties that all requests of a series share. "" if absent, or if the grain does not keep the column. A series
# without a tenant sums over all tenants.
_SERIES = (
    Column("tenant_id", ID, nullable=False),
    Column("api_key_id", ID, nullable=False),
    Column("adapter_id", ID, nullable=False),
    Column("adapter_version_id", ID, nullable=False),
    Column("model", String(200), nullable=False),
    Column("base", String(200), nullable=False),
    Column("endpoint", String(40), nullable=False),
    Column("end_user", String(128), nullable=False),
    Column("status", String(16), nullable=False),
    Column("service_tier", String(16), nullable=False, server_default=""),
)
SERIES = tuple(column.name for column in _SERIES)
"""The columns that distinguish series."""

usage_series = Table(
    "usage_series",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    *_SERIES,
    UniqueConstraint(*SERIES),
)

usage_rollups = Table(
    "usage_rollups",
    metadata,
    # Determines which columns of a series are kept. All grains sum the same requests: see platform/ledger/grains.py.
    Column("grain", SmallInteger, primary_key=True),
    # Length of the span, from a minute to sixteen days. Spans are aligned to 1970.
    Column("span_us", BigInteger, primary_key=True),
    Column("start_us", BigInteger, primary_key=True),
    # Copied from the series, so that one tenant's rows can be found without a join.
    Column("tenant_id", ID, primary_key=True),
    Column("series_id", BigInteger, ForeignKey("usage_series.id"), primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cost_nanos", BigInteger, nullable=False),
    Index("ix_usage_rollups_tenant_span_start", "tenant_id", "grain", "span_us", "start_us"),
    sqlite_with_rowid=False,
)

prices = Table(
    "prices",
    metadata,
    Column("id", ID, primary_key=True),
    # The tenant to which the price applies. NULL for the list price, which applies to every tenant without its own
    # price.
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=True),
    # `all`, `base`, `adapters`, or one adapter's identifier.
    Column("scope", ID, nullable=False),
    # ISO 4217 code. It is the same in the whole database, so that amounts can be added up.
    Column("currency", String(3), nullable=False),
    # Billionths of the currency per million tokens. Cached tokens are part of the prompt and never cost more
    # than its other tokens.
    Column("prompt_nanos", BigInteger, nullable=False),
    Column("cached_nanos", BigInteger, nullable=False),
    Column("completion_nanos", BigInteger, nullable=False),
    # What requests of batches pay, in percent of these amounts.
    Column("batch_percent", Integer, nullable=False, server_default="100"),
    # What requests of these service tiers pay, in percent.
    Column("flex_percent", Integer, nullable=False, server_default="100"),
    Column("priority_percent", Integer, nullable=False, server_default="100"),
    # In force from this time until the next price for the same tenant and scope.
    Column("effective_us", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Index("ix_prices_tenant_id_id", "tenant_id", "id"),
    CheckConstraint(
        "prompt_nanos >= 0 AND cached_nanos >= 0 AND completion_nanos >= 0 AND cached_nanos <= prompt_nanos",
        name="amounts",
    ),
)

audit_log = Table(
    "audit_log",
    metadata,
    Column("id", ID, primary_key=True),
    Column("created_us", BigInteger, nullable=False),
    # The key that made the change, `operator` for the operator's own key, `oidc_...` for a single sign-on user, or
    # `system`.
    Column("actor", ID, nullable=False),
    # The client address and the identifier of the API call. NULL if no call made the change.
    Column("address", String(64), nullable=True),
    Column("request_id", ID, nullable=True),
    # The kind of change, such as `alias.set`.
    Column("action", String(40), nullable=False),
    # Owner of the changed object. NULL for the platform's objects. Not a foreign key, because the log outlives its
    # subjects.
    Column("tenant_id", ID, nullable=True),
    Column("target", String(200), nullable=False),
    # {field: [before, after]} for each changed field, never a secret.
    Column("changes", JSON, nullable=False),
    Index("ix_audit_log_tenant_id_id", "tenant_id", "id"),
    Index("ix_audit_log_target_id", "target", "id"),
)

# What happened to tenants' adapters and budgets. Kept for a limited time.
events = Table(
    "events",
    metadata,
    Column("id", ID, primary_key=True),
    # The kind of event, such as `alias.moved`.
    Column("type", String(40), nullable=False),
    # Not foreign keys, because events outlive their subjects.
    Column("tenant_id", ID, nullable=False),
    # NULL if the event concerns no adapter.
    Column("adapter_id", ID, nullable=True),
    Column("created_us", BigInteger, nullable=False, index=True),
    Column("data", JSON, nullable=False),
    # The event's number among all events, and among those of its tenant. NULL until a server numbers the event, after
    # the transaction that wrote it. See platform/events/event_log.py.
    Column("position", BigInteger, nullable=True, unique=True),
    Column("sequence", BigInteger, nullable=True),
    Index("ix_events_tenant_id_sequence", "tenant_id", "sequence"),
    _partial_index("position IS NULL", "ix_events_unnumbered", "id"),
)

# The highest numbers given to events: of each tenant, and of all events (`all`).
event_heads = Table(
    "event_heads",
    metadata,
    Column("tenant_id", ID, primary_key=True),
    Column("number", BigInteger, nullable=False),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False),
    Column("url", String(2000), nullable=False),
    # The types of events to deliver. null stands for all.
    Column("types", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("created_us", BigInteger, nullable=False),
    # The tenant's number of the last event that was delivered or skipped.
    Column("sequence", BigInteger, nullable=False),
    # Failed attempts since the last delivery, when the next attempt is due, and why the last one failed.
    Column("num_failures", Integer, nullable=False),
    Column("due_us", BigInteger, nullable=False),
    Column("last_error", String(200), nullable=True),
    Column("delivered_us", BigInteger, nullable=True),
    Column("claimed_by", ID, nullable=True),
    Column("claim_expires_us", BigInteger, nullable=True),
    Index("ix_webhooks_tenant_id_id", "tenant_id", "id"),
    CheckConstraint("state IN ('active', 'disabled')", name="state"),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    # The caller. Different callers may choose the same key.
    Column("principal", String(200), primary_key=True),
    # SHA-256 of the Idempotency-Key that the client sent.
    Column("key_sha256", LargeBinary(32), primary_key=True),
    # SHA-256 of the path, the query and the body. A different call with the same key is refused.
    Column("request_sha256", LargeBinary(32), nullable=False),
    # NULL while the first call is running, and permanently if its process died during the call.
    Column("status", Integer, nullable=True),
    Column("headers", JSON, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False),
    Index("ix_idempotency_keys_expires", "expires_us"),
)

console_sessions = Table(
    "console_sessions",
    metadata,
    # SHA-256 of the session's cookie, which is not stored.
    Column("id_sha256", LargeBinary(32), primary_key=True),
    # The signed-in user: a key, the operator, or a single sign-on user.
    Column("key_id", String(64), nullable=False),
    # The session's content, encrypted with a key derived from the cookie, so it is unreadable without the cookie.
    Column("sealed", LargeBinary, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False),
    Index("ix_console_sessions_key_created", "key_id", "created_us"),
    Index("ix_console_sessions_expires", "expires_us"),
)

login_failures = Table(
    "login_failures",
    metadata,
    # An IPv4 address or an IPv6 network.
    Column("origin", String(64), primary_key=True),
    # When all of the origin's failures are forgotten. Each failure postpones this time.
    Column("forgiven_us", BigInteger, nullable=False),
    Index("ix_login_failures_forgiven", "forgiven_us"),
)

# Servers that share requests, one row per running server. A server proves that it is alive by changing `beat`.
replicas = Table(
    "replicas",
    metadata,
    Column("id", ID, primary_key=True),
    # HOST:PORT of the listener for other servers.
    Column("address", String(300), nullable=False),
    # SHA-256 of the model, dtype, quantisation and page size, hexadecimal. It must match for servers to share requests,
    # unless requests are divided between bases by weight.
    Column("base", String(64), nullable=False),
    # The base's identifier in `bases`. NULL for a server of an older version.
    Column("base_id", String(64), nullable=True),
    Column("version", String(40), nullable=False),
    Column("protocol", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("beat", BigInteger, nullable=False),
    Column("num_running", Integer, nullable=False),
    Column("num_waiting", Integer, nullable=False),
    # Maximum number of sequences that the engine runs at once.
    Column("capacity", Integer, nullable=False),
    Column("num_pages", Integer, nullable=False),
    Column("num_free_pages", Integer, nullable=False),
    # The server's valid certificates, as PEM. Other servers accept these and no others.
    Column("certificates", String(8192), nullable=False),
    CheckConstraint("state IN ('serving', 'draining')", name="state"),
)

# The adapters in each server's pool. Separate from `replicas`, because the adapters change less often than
# the beat.
adapter_residency = Table(
    "adapter_residency",
    metadata,
    Column("replica_id", ID, ForeignKey("replicas.id"), primary_key=True),
    # Number of changes to `summary`, so that readers fetch it only if it has changed.
    Column("version", BigInteger, nullable=False),
    # The first 8 bytes of each adapter's digest, sorted.
    Column("summary", LargeBinary(32768), nullable=False),
    CheckConstraint("length(summary) <= 32768", name="summary"),
)

signals = Table(
    "signals",
    metadata,
    # `caches` counts changes to rows that gateways cache: see cache_triggers.py. A gateway writes `probe` to test
    # whether the database accepts writes again.
    Column("name", String(16), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
