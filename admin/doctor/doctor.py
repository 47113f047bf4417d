"""`loramux doctor`: checks this machine, the connection to a server, and the server itself."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.errors import PullRefused, StoreError
from loramux.adapter_store.pulling.model_name import ModelName
from loramux.admin.client.client import AdminClient, AdminError, Document, ServerUnreachable
from loramux.admin.doctor.checks import (
    check_cpu,
    check_data_directory,
    check_database,
    check_disk,
    check_engine_socket,
    check_package,
    check_python,
    check_quantized,
    check_sandbox,
    check_skew,
    check_store,
)
from loramux.admin.doctor.extensions import check_extensions
from loramux.admin.doctor.findings import Finding, Grade
from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.pulled_model import local_path
from loramux.admin.server.settings import ModelReference, ModelSettings
from loramux.kernels.cpu.instructions.capability import host_features
from loramux.migrations.database import Database, DatabaseError

SERVER_TIMEOUT_S = 30.0


class HostSettings(ModelSettings):
    """The settings of a server on this machine that the doctor checks. All are optional."""

    model: ModelReference | None = None
    blob_url: str | None = None
    sandbox: Literal["preferred", "required"] = "preferred"


def check_here() -> Iterator[Finding]:
    """Check what commands and servers need from this machine."""
    yield check_python(sys.version_info[:3])
    yield Finding(check="loramux", grade=Grade.OK, message=f"loramux {version('loramux')} on {platform.system()}")
    yield check_package("torch")
    yield check_cpu(host_features())
    yield from check_extensions()


def check_host(settings: HostSettings) -> Iterator[Finding]:
    """Check the dependencies of a server with these settings. Writes only a probe object, to the store."""
    yield check_engine_socket(DataDirectory(settings.data_dir).run)
    yield check_data_directory(settings.data_dir)
    yield check_disk(settings.data_dir)
    yield from check_quantized(DataDirectory(settings.data_dir).quantized)
    yield check_sandbox(settings.sandbox == "required")
    if settings.model is not None:
        yield from _check_base(settings, settings.model)
    yield from _check_database_at(settings.resolved_database_url)
    url = settings.blob_url or f"file://{settings.data_dir.absolute() / 'blobs'}"
    if settings.blob_url is None and not (settings.data_dir / "blobs").exists():
        return
    try:
        yield check_store(open_blob_store(url))
    except StoreError as error:
        yield Finding(check="object store", grade=Grade.FAILED, message=str(error), mend="change LORAMUX_BLOB_URL")


def check_server(client: AdminClient, now_s: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Check the connection to a server and the server's version and clock, and collect the server's own findings."""
    before_s = now_s()
    try:
        server = client.get("server")
    except ServerUnreachable as error:
        yield Finding(
            check="server",
            grade=Grade.FAILED,
            message=str(error),
            mend="repair what is named here; the server's log says more"
            if error.not_ready_because is not None
            else "start the server, fix the network, or choose another server: loramux profiles use NAME",
        )
        return
    except AdminError as error:
        yield _refusal(error)
        return
    after_s = now_s()
    # Older servers do not report their quantisation.
    quantization = server.get("quantization")
    weights = "" if quantization is None else f" with weights in {quantization}"
    yield Finding(
        check="server",
        grade=Grade.OK,
        message=f"{client.url} serves {server['base_model']}{weights} and answered in "
        f"{1000 * (after_s - before_s):.0f} ms",
    )
    yield _check_versions(version("loramux"), str(server["version"]))
    skew_s = server["time_ms"] / 1000 - (before_s + after_s) / 2
    yield check_skew("clock", skew_s, "the server's clock")
    try:
        findings: list[Document] = client.get("server/findings")["data"]
    except (AdminError, ServerUnreachable) as error:
        yield Finding(
            check="server",
            grade=Grade.FAILED,
            message=f"the server did not report its findings: {error}",
            mend="read its log, or run 'loramux doctor --data-dir DIR' on its machine",
        )
        return
    yield from (Finding.from_document(document) for document in findings)
    yield from _check_bandwidth(client)


def _check_bandwidth(client: AdminClient) -> Iterator[Finding]:
    """How well decode steps have used a GPU's memory bandwidth. Nothing if the engine has not measured any."""
    try:
        # Older servers do not report it.
        used = client.get("engine").get("bandwidth_utilization")
    except (AdminError, ServerUnreachable):
        # The server's own findings say why its engine does not answer.
        return
    if used is not None:
        message = f"decode steps have used {100 * used:.0f} % of the GPU's memory bandwidth"
        yield Finding(check="bandwidth", grade=Grade.OK, message=message)


def _refusal(error: AdminError) -> Finding:
    mends = {
        401: "the key is wrong, expired or revoked: use another key (loramux profiles add, or LORAMUX_ADMIN_KEY)",
        403: "use a key with the scope platform:read or platform:admin",
        404: "the server is older than this command line, or the URL does not belong to its admin listener",
    }
    return Finding(
        check="server",
        grade=Grade.FAILED,
        message=f"the server refused with {error.status}: {error.message}",
        mend=mends.get(error.status, "read the server's log"),
    )


def _check_versions(ours: str, theirs: str) -> Finding:
    if ours == theirs:
        return Finding(check="versions", grade=Grade.OK, message=f"the command line and the server have version {ours}")
    return Finding(
        check="versions",
        grade=Grade.WARNING,
        message=f"the command line has version {ours}, but the server has version {theirs}",
        mend=f"install the server's version here: loramux {theirs}",
    )


def _check_database_at(url: str) -> list[Finding]:
    try:
        database = Database(url)
    except DatabaseError as error:
        return [Finding(check="database", grade=Grade.FAILED, message=str(error), mend="change LORAMUX_DATABASE_URL")]
    try:
        return check_database(database)
    finally:
        database.close()


def _check_base(settings: HostSettings, model: Path | ModelName) -> Iterator[Finding]:
    try:
        path = model if isinstance(model, Path) else local_path(model.url, settings)
    except PullRefused as error:
        mend = "the server pulls it when it starts; 'loramux pull' does so now"
        yield Finding(check="model", grade=Grade.WARNING, message=error.message, mend=mend)
        return
    yield _check_model(path)
    yield _check_tokenizer(path)


def _check_model(directory: Path) -> Finding:
    from loramux.engine.architectures.gguf_model import model_directory
    from loramux.engine.architectures.model_config import ModelConfig
    from loramux.engine.protocol.errors import EngineError

    try:
        model = ModelConfig.load(model_directory(directory))
    except (EngineError, OSError) as error:
        return Finding(
            check="model",
            grade=Grade.FAILED,
            message=str(error),
            mend="set --model to a directory written by Hugging Face's save_pretrained, with safetensors weights, or "
            "to a GGUF file",
        )
    weights = "" if model.quantization is None else f" with weights in {model.quantization.name}"
    return Finding(check="model", grade=Grade.OK, message=f"{directory} is a servable {model.architecture}{weights}")


def _check_tokenizer(model: Path) -> Finding:
    from loramux.engine.architectures.gguf_model import model_directory
    from loramux.engine.protocol.errors import ModelNotSupported
    from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

    try:
        tokenizer = ModelTokenizer.load(model_directory(model))
    except (ModelNotSupported, OSError) as error:
        return Finding(
            check="tokenizer",
            grade=Grade.FAILED,
            message=str(error),
            mend="copy the model's tokenizer.json and tokenizer_config.json into the directory",
        )
    if tokenizer.chat_template is None:
        return Finding(
            check="tokenizer",
            grade=Grade.WARNING,
            message=f"{model} has no chat template, so /v1/chat/completions returns 400",
            mend="add chat_template.jinja if clients use chat; /v1/completions does not need it",
        )
    return Finding(check="tokenizer", grade=Grade.OK, message=f"{model} has a tokenizer and a chat template")
