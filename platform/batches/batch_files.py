"""A running batch's files: the input, which is read line by line, and the output and error files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loramux.platform.batches.batch_claims import AnsweredLine, BatchClaim
from loramux.platform.batches.batch_rows import Batch, BatchError, BatchState
from loramux.platform.batches.input_lines import MAX_ERRORS, InputLine, parsed_line, read_lines
from loramux.platform.batches.output_lines import not_run
from loramux.platform.batches.tenant_files import Owner, TenantFile, TenantFiles
from loramux.platform.errors import NotFound
from loramux.platform.requests.services import GatewaySettings


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Blocking. `scratch` is a directory of the batch's own."""

    claim: BatchClaim
    files: TenantFiles
    batch: Batch
    scratch: Path
    settings: GatewaySettings

    def fetch_input(self) -> bool:
        """Copy the input to the disk. If it does not exist, end the batch and return False."""
        owner = Owner(self.batch.tenant_id, self.batch.api_key_id, is_limited=False)
        try:
            self.files.fetch(self.files.get(owner, self.batch.input_file_id), self._input)
        except NotFound as error:
            self.claim.fail(self.batch.id, [BatchError(error.code, error.message, "input_file_id")])
            return False
        return True

    def begin(self) -> BatchState:
        """Check the input and store its lines. If a line is wrong, end the batch. Return the batch's state."""
        errors: list[BatchError] = []

        def good_lines() -> Iterator[InputLine]:
            for one in read_lines(self._input, self.batch.endpoint, self.settings.max_body_bytes):
                if isinstance(one, BatchError):
                    errors.append(one)
                elif not errors:
                    yield one

        state = self.claim.begin(self.batch.id, good_lines(), lambda: not errors)
        if errors:
            self.claim.fail(self.batch.id, errors[:MAX_ERRORS])
            return "failed"
        return state

    def lines(self, places: Iterable[tuple[int, int]]) -> list[bytes]:
        """Return the lines that begin at these bytes of the input and have these lengths."""
        contents = []
        with self._input.open("rb") as file:
            for start, num_bytes in places:
                file.seek(start)
                contents.append(file.read(num_bytes))
        return contents

    def finish(self) -> None:
        """Write the output and error files, and end the batch. Can be repeated after a crash."""
        batch = self.claim.begin_files(self.batch.id)
        num_unrun = 0
        output, errors = self.scratch / "output", self.scratch / "errors"
        is_cancelled = batch.state == "cancelling"
        with output.open("wb") as completed, errors.open("wb") as failed:
            for one in self.claim.answers(batch.id):
                if one.content is None:
                    num_unrun += 1
                    failed.write(self._not_run(one, is_cancelled=is_cancelled))
                else:
                    (completed if one.status == 200 else failed).write(one.content)
        ids = [
            self._put(batch, file_id, path)
            for file_id, path in ((batch.output_file_id, output), (batch.error_file_id, errors))
        ]
        state: BatchState = "cancelled" if is_cancelled else "expired" if num_unrun else "completed"
        self.claim.finish(batch.id, state, ids, num_unrun)

    def _not_run(self, line: AnsweredLine, *, is_cancelled: bool) -> bytes:
        [content] = self.lines([(line.start, line.num_bytes)])
        custom_id, _ = parsed_line(content, self.batch.endpoint)
        code, reason = ("batch_cancelled", "was cancelled") if is_cancelled else ("batch_expired", "has expired")
        return not_run(line.line, self.batch.id, custom_id, code, f"the request did not run: the batch {reason}")

    def _put(self, batch: Batch, file_id: str | None, path: Path) -> str | None:
        """Keep a file unless it is empty, and return its identifier."""
        assert file_id is not None
        num_bytes = path.stat().st_size
        if not num_bytes:
            return None
        name = f"{batch.id}_{path.name}.jsonl"
        # The time orders the file behind older ones, and stays the same if the batch is interrupted now.
        assert batch.finalizing_us is not None
        file = TenantFile(
            id=file_id,
            tenant_id=batch.tenant_id,
            api_key_id=batch.api_key_id,
            purpose="batch_output",
            name=name,
            num_bytes=num_bytes,
            created_us=batch.finalizing_us,
            expires_us=None,
        )
        # A server that has lost its claim must not replace the file of the server that has it.
        self.claim.renew(batch.id)
        self.files.put_output(file, path, batch.output_lifetime_us)
        return file_id

    @property
    def _input(self) -> Path:
        return self.scratch / "input"
