from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.registry.evals import NewEval
from loramux.adapter_store.registry.records import Adapter, UploadFile
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.tenants import Tenant
from tests.adapter_store.validation.hostile import good_files
from tests.admin.added_batches import add_batch
from tests.admin.admin_side import ADMIN_KEY, AdminSide
from tests.admin.metered_requests import begin_request

ROLES = ("tenant:admin", "tenant:develop", "tenant:read")

BASE_ID = "b" * 64


class ApiStock:
    """A tenant with objects of every kind, and a second tenant that cannot see any of them.

    The admin side must use the hostile catalogue's target, because its worker validates the adapter's version.
    """

    def __init__(self, side: AdminSide) -> None:
        self._services = side.services
        self._side = side
        self.tenant: Tenant = self._services.accounts.tenants.create("acme")
        self.adapter: Adapter = self._services.adapters.registry.create_adapter(self.tenant.id, "support")
        self._stranger = self._services.accounts.tenants.create("globex")
        self.caller = self._services.accounts.api_keys.create(self.tenant.id, "caller").secret
        files = good_files()
        self._contents = {CONFIG_FILE: files.config_bytes, TENSORS_FILE: files.tensor_bytes}
        self._open_id = ""
        self._eval_id = new_id("evl")
        self.version = self._services.adapters.ingest.create_version(self.adapter.id, self._upload(is_sent=True))

    def admin_keys(self) -> list[str]:
        """Return the operator's key, a viewer's key, one key per tenant role, and a key of the second tenant."""
        keys = self._services.accounts.api_keys
        made = [keys.create(None, "viewer", ["platform:read"])]
        made += [keys.create(self.tenant.id, role, [role]) for role in ROLES]
        made.append(keys.create(self._stranger.id, "stranger", ["tenant:admin"]))
        return [ADMIN_KEY, *(one.secret for one in made)]

    def names(self, path: str) -> Mapping[str, Any]:
        """Return names of existing objects, by parameter, for the operation with this path."""
        services = self._services
        key = services.accounts.api_keys.create(self.tenant.id, "known").key
        quota = services.usage.quotas.set(self.tenant.id, "tokens_per_day", 1_000_000)
        price = services.usage.prices.add(
            tenant_id=self.tenant.id,
            scope="all",
            prompt_nanos=1,
            cached_nanos=None,
            completion_nanos=2,
            effective_us=services.database.now_us() + 86_400_000_000,
        )
        services.adapters.bases.register(BASE_ID, "the-base")
        return {
            "base_id": BASE_ID,
            "tenant": "acme",
            "id_or_slug": "acme",
            "adapter_id": self.adapter.id,
            "adapter": self.adapter.id,
            "key_id": key.id,
            "key": key.id,
            "number": 1,
            "version": 1,
            "upload_id": self._open_upload(),
            "name": CONFIG_FILE if "/files/" in path else "default",
            "quota_id": quota.id,
            "metric": "tokens_per_day",
            "price_id": price.id,
            "eval_id": self._eval(),
            "batch_id": add_batch(services.database, self.tenant.id, key.id),
            "job_id": self.version.id.replace("adv_", "job_"),
            "request_id": begin_request(self._side, self.tenant.id, key.id, "acme/support@1", 10),
            "model": "the-base",
        }

    def _eval(self) -> str:
        """Return an eval's identifier. It exists once the version has been validated."""
        services = self._services.adapters
        if not services.evals.list(self.adapter.id, 1, 1).data and self._is_ready():
            content = b'{"prompt": "p", "equal": "q"}'
            new = NewEval(name="tests.jsonl", sha256=hashlib.sha256(content).hexdigest(), content=content, num_cases=1)
            self._eval_id = services.evals.create(self.adapter.id, 1, new).id
        return self._eval_id

    def _is_ready(self) -> bool:
        version = self._services.adapters.registry.get_version(self.adapter.id, 1)
        return version is not None and version.state == "ready"

    def _open_upload(self) -> str:
        """Return an open upload's identifier. Uploads are limited, so the same one is reused until a call closes it."""
        found = self._services.adapters.ingest.upload_rows.get_upload(self._open_id)
        if found is None or found.state != "open":
            self._open_id = self._upload(is_sent=False)
        return self._open_id

    def _upload(self, is_sent: bool) -> str:
        declared = tuple(
            UploadFile(name, len(content), hashlib.sha256(content).hexdigest())
            for name, content in self._contents.items()
        )
        upload = self._services.adapters.ingest.create_upload(self.adapter.id, declared)
        if is_sent:
            for name, content in self._contents.items():
                self._services.adapters.ingest.put_file(upload.id, name, [content])
        return upload.id
