"""Errors about adapters, their uploads and their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_PARAM_LEN = 200


def printable(text: str, max_len: int) -> str:
    """Make a tenant's text safe to display: shorten it, and replace invisible and bidirectional characters with `?`."""
    shown = text if len(text) <= max_len else text[: max_len - 3] + "..."
    return "".join(character if character.isprintable() else "?" for character in shown)


class StoreError(Exception):
    """Base class of the adapter store's errors."""


class Refused(StoreError):
    """A client's input was refused. The error has a stable code, a message, and the field or tensor at fault."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = None if param is None else printable(param, _MAX_PARAM_LEN)


class AdapterRejected(Refused):
    """An adapter's files failed validation. `report` lists the checks up to the failure.

    The codes, grouped by cause:

    - the tensors file: `not_a_file`, `truncated_file`, `pickle_not_allowed`, `archive_not_allowed`, `not_safetensors`,
      `header_too_large`, `invalid_header`, `duplicate_key`, `invalid_offsets`, `unsupported_dtype`, `empty_tensor`,
      `tensor_not_2d`;
    - the shards of a tensors file: `invalid_index`, `missing_shard`, `duplicate_key`, `missing_tensor`;
    - the configuration: `config_too_large`, `invalid_json`, `duplicate_key`, `invalid_config`, `unknown_config_key`,
      `unsupported_config`, `rank_out_of_range`, `alpha_out_of_range`, `unknown_module`;
    - the optional files: `file_too_large`, `invalid_template`, `invalid_json`, `duplicate_key`,
      `invalid_generation_config`, `invalid_parsers`, `invalid_vocabulary`, `invalid_tokenizer`, `token_collision`;
    - the files together: `base_mismatch`, `rank_mismatch`, `token_mismatch`, `vocabulary_missing`, `missing_tensor`,
      `unexpected_tensor`, `wrong_dimensions`, `ambiguous_names`, `adapter_too_large`;
    - the values: `not_finite`, `norm_too_large`, `zero_effect`, `invalid_magnitude`;
    - the uploaded bytes: `upload_incomplete`, `size_mismatch`, `checksum_mismatch`;
    - an operator's source: `source_not_found`, `source_unavailable`, `source_unauthorized`, `source_moved`,
      `source_not_allowed`, `invalid_source`, `file_too_large`, `size_mismatch`, `checksum_mismatch`,
      `identical_version`, `insufficient_quota`;
    - weights that match a quarantined version: `quarantined`;
    - stored files that cannot be validated for another base: `original_not_kept`, `stored_files_damaged`;
    - validation itself: `validation_timeout`, `validation_killed`, `validation_failed`.
    """

    def __init__(
        self, code: str, message: str, param: str | None = None, report: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(code, message, param)
        self.report: Mapping[str, Any] = report or {}


class PushUnderway(StoreError):
    """A version with the same files is being validated. Push again later to get that version."""


class MergeRefused(Refused):
    """Adapters cannot be merged. `param` is the adapter, the module or the setting at fault.

    The codes: `invalid_sources`, `invalid_model_name`, `invalid_weight`, `invalid_density`, `merge_unsupported`,
    `merge_across_tenants`, `shape_mismatch`, `wrong_dimensions`, `rank_mismatch`, `rank_out_of_range`,
    `missing_tensor`, and the codes of AdapterRejected for a file that cannot be read.
    """


class ConversionRefused(Refused):
    """A file of another format cannot be read as an adapter or a base. `param` is the metadata key or tensor at fault.

    The codes: `not_a_file`, `not_gguf`, `unsupported_gguf`, `truncated_file`, `header_too_large`, `invalid_header`,
    `duplicate_key`, `invalid_offsets`, `unsupported_dtype`, `tensor_not_2d`, `not_an_adapter`,
    `unsupported_architecture`, `alpha_out_of_range`, `unexpected_tensor`, `missing_tensor`, `rank_mismatch`,
    `base_needed`, `base_mismatch`, `invalid_metadata`, `unsupported_metadata`, `missing_part`, `not_writable`,
    `unsupported_tokenizer`, `invalid_tokenizer`, `invalid_template`.
    """


class PullRefused(Refused):
    """A base model cannot be pulled, found or removed.

    The codes: `invalid_model`, `not_pulled`, `not_a_base`, `choose_a_file`, `only_pickles`, `file_missing`,
    `file_too_large`, `invalid_index`, `size_mismatch`, `checksum_mismatch`, `disk_full`, `model_in_use`,
    `directory_not_usable`, `source_not_trusted`, and the codes of AdapterRejected for a source.
    """


class BaseNotSupported(StoreError):
    """loramux cannot read the base model's quantised weights. The message names the tensor or the setting at fault."""


class UploadRefused(Refused):
    """An upload's declaration, bytes or source cannot be accepted, or the upload has expired or was already used."""


class LimitReached(StoreError):
    """A tenant has reached a cap on uploads or pending versions. `code` names the cap. A retry may succeed."""

    def __init__(self, code: str, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidName(Refused):
    """The name of an adapter or alias is malformed or reserved."""


class InvalidAlias(Refused):
    """An alias cannot point to the given versions, or cannot be removed."""


class InvalidEval(Refused):
    """The file of an eval, or its options, cannot be used. `param` names the line or the option at fault."""


class InvalidGrant(Refused):
    """An adapter cannot be granted to this tenant."""


class AdapterExists(StoreError):
    """The tenant already has an adapter of that name."""


class AdapterInUse(StoreError):
    """The adapter has versions or uploads. It can be disabled, but not deleted."""


class BaseNotFound(StoreError):
    """There is no such base."""


class BaseInUse(StoreError):
    """A server serves the base, so the base cannot be forgotten."""


class InvalidBaseWeights(Refused):
    """The given weights cannot be used to divide requests between bases."""


class BasesDiffer(StoreError):
    """Requests cannot be divided between bases with different tokenizers, chat templates or served names."""


class TenantNotFound(StoreError):
    """There is no such tenant."""


class AdapterNotFound(StoreError):
    """There is no such adapter."""


class VersionNotFound(StoreError):
    """The adapter has no such version."""


class VersionNotReady(StoreError):
    """The version's state does not allow the operation, for example because it has not passed validation."""


class VersionInUse(StoreError):
    """An alias names the version. Move the alias first."""


class RequestsRunning(StoreError):
    """Requests are running on versions that are to be purged. A retry may succeed."""

    def __init__(self, num_running: int) -> None:
        requests = "1 request is" if num_running == 1 else f"{num_running} requests are"
        super().__init__(f"{requests} still running on what is to be purged; try again when no request is running")


class ValidationFailed(StoreError):
    """Validation could not run. The adapter may still be valid."""


class WeightsBeingPurged(StoreError):
    """The blobs of equal weights are being deleted. A retry succeeds once that is done."""


class AliasNotFound(StoreError):
    """The adapter has no such alias."""


class AliasChanged(StoreError):
    """Another client changed the alias first."""


class NothingToRollBack(StoreError):
    """The alias has no such revision to roll back to."""


class EvalNotFound(StoreError):
    """There is no such eval."""


class EvalNotPassed(StoreError):
    """The alias demands an eval that the version has not passed."""


class GrantNotFound(StoreError):
    """The adapter was not granted to the tenant."""


class UploadNotFound(StoreError):
    """There is no such upload."""


class ClaimLost(StoreError):
    """Another server has claimed the version, or the version's verdict has been recorded."""


class SourceUnavailable(StoreError):
    """A bucket or hub cannot be read at the moment. A retry may succeed, perhaps only after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OriginalNotKept(StoreError):
    """The version was created before loramux began to keep uploaded files."""


class FileNotFound(StoreError):
    """The version has no file of that name."""


class AdapterUnavailable(StoreError):
    """The adapter's bytes are unavailable at the moment. A retry may succeed."""


class LoadCancelled(AdapterUnavailable):
    """The load was cancelled because the adapter is no longer needed."""


class AdapterCorrupt(StoreError):
    """An adapter's bytes do not match their checksum. They are never served."""


class PackedForOtherBase(StoreError):
    """A packed file depends on the weights of another base. It is intact, but never served with this base."""


class BlobNotFound(StoreError):
    """No blob has that key."""


class BlobTooLarge(StoreError):
    """The blob is larger than the caller accepts."""


class PartsMissing(StoreError):
    """The uploaded parts of a blob do not add up to the declared size."""


class BlobStoreUnavailable(StoreError):
    """The blob store is unreachable or not working. The message says which store and why.

    While the circuit breaker is open, `retry_after_s` is the number of seconds until the store is tried again.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BlobDamaged(AdapterCorrupt, BlobStoreUnavailable):
    """Every read of the blob returned bytes that do not match its stored checksum.

    A caller that can rebuild the file catches this error as an AdapterCorrupt. Other callers catch it as a
    BlobStoreUnavailable, and retry later.
    """


class InvalidBlobUrl(StoreError):
    """The blob store's URL is invalid. The message says how to fix it."""
