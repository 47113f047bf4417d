"""Checks of a serving machine, for a server's self-check and for the doctor."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.errors import StoreError, ValidationFailed
from loramux.adapter_store.sandbox.confinement import CALLS, ESSENTIAL, FILES, MEASURES, NETWORK, PRIVILEGES
from loramux.adapter_store.validation.validator import missing_measures
from loramux.admin.doctor.findings import Finding, Grade
from loramux.engine.quantizing.messages import QUALITY_FILES, Quality
from loramux.kernels.cpu.instructions.capability import bfloat16_products, byte_products, integer_products
from loramux.migrations.database import Database, DatabaseError, NoDatabase, WrongSchema
from loramux.platform.engine_link.engine_socket import MAX_SOCKET_PATH, SOCKET_NAME, TEMPORARY_PREFIX

PYTHONS = ((3, 11), (3, 14))
"""Range of Python versions `[first, end)` that this version of loramux is tested with."""
LITTLE_DISK_BYTES, TOO_LITTLE_DISK_BYTES = 5 << 30, 512 << 20
SKEW_WARNING_S, SKEW_FAILED_S = 2.0, 30.0
"""Clock skews at which a check warns and fails, in seconds. Quota windows and key expiry need synchronized clocks."""
SLOW_DATABASE_S = 0.1
SOCKET_PART = f"/{TEMPORARY_PREFIX}xxxxxxxx/{SOCKET_NAME}"
"""The part of the engine's socket path below the temporary directory. Only its length matters."""

SANDBOX_FIXES = {
    PRIVILEGES: "run Linux 3.5 or later",
    NETWORK: "allow user namespaces (sysctl user.max_user_namespaces)",
    FILES: "boot Linux 5.13 or later with landlock in its list of security modules (lsm=landlock,...; see "
    "/sys/kernel/security/lsm), and let the container's seccomp profile allow the three landlock_* calls",
    CALLS: "run on x86-64 or 64-bit ARM, and let the container's seccomp profile allow prctl(PR_SET_SECCOMP)",
}


def check_python(running: tuple[int, int, int]) -> Finding:
    shown = ".".join(str(part) for part in running)
    if not PYTHONS[0] <= running[:2] < PYTHONS[1]:
        return Finding(
            check="python",
            grade=Grade.FAILED,
            message=f"Python {shown} is not supported",
            mend="create the environment with Python 3.11, 3.12 or 3.13: make venv PYTHON=python3.11",
        )
    return Finding(check="python", grade=Grade.OK, message=f"Python {shown} on {platform.machine()}")


def check_package(name: str, find_version: Callable[[str], str] = version) -> Finding:
    """Check that a package needed by the engine is installed, without importing it."""
    try:
        return Finding(check=name, grade=Grade.OK, message=f"{name} {find_version(name)}")
    except PackageNotFoundError:
        return Finding(
            check=name,
            grade=Grade.WARNING,
            message=f"{name} is not installed here",
            mend="nothing to do if this machine only calls servers; to serve, install loramux with pip or 'make venv'",
        )


def check_cpu(features: Collection[str]) -> Finding:
    """Report how a server would multiply matrices on this CPU."""
    floats = bfloat16_products(features) or "float32 arithmetic"
    integers = integer_products(features)
    if integers is None:
        codes = "8-bit and 4-bit weights are dequantised when they are loaded"
    else:
        weights = byte_products(features)
        option = "" if weights is None else f" (8-bit for {weights} with --activations int8)"
        codes = f"8-bit and 4-bit weights with {integers}, 16-bit activations{option}"
    return Finding(check="cpu", grade=Grade.OK, message=f"bfloat16 weights with {floats}; {codes}")


def check_database(database: Database, host_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> list[Finding]:
    """Check that the database answers quickly, its schema matches the code, and its clock matches the host's clock."""
    try:
        database.check_schema()
        took_s = min(_round_trip_s(database) for _ in range(3))
    except NoDatabase as error:
        mend = "the server creates it on its first start; if it should already exist, set --data-dir or --database-url"
        return [Finding(check="database", grade=Grade.WARNING, message=str(error), mend=mend)]
    except (DatabaseError, SQLAlchemyError) as error:
        return [
            Finding(
                check="database",
                grade=Grade.FAILED,
                message=str(error).splitlines()[0],
                mend=f"back the database up, then {error.fix}"
                if isinstance(error, WrongSchema)
                else "start the database, fix the network, or change LORAMUX_DATABASE_URL",
            )
        ]
    kind = "SQLite" if database.is_sqlite else "PostgreSQL"
    is_slow = took_s > SLOW_DATABASE_S
    findings = [
        Finding(
            check="database",
            grade=Grade.WARNING if is_slow else Grade.OK,
            message=f"{kind} answers in {1000 * took_s:.0f} ms and its schema is up to date",
            mend="every request reserves and settles quota in the database: move it closer, or to faster disks"
            if is_slow
            else None,
        )
    ]
    if not database.is_sqlite:
        try:
            with database.read() as connection:
                before_us = host_us()
                skew_s = (database.now_us(connection) - (before_us + host_us()) // 2) / 1_000_000
        except SQLAlchemyError:
            return findings
        findings.append(check_skew("database clock", skew_s, "the database's clock"))
    return findings


def _round_trip_s(database: Database) -> float:
    begun = time.monotonic()
    with database.read() as connection:
        connection.execute(select(1))
    return time.monotonic() - begun


def check_skew(check: str, skew_s: float, theirs: str) -> Finding:
    size_s = abs(skew_s)
    if size_s < SKEW_WARNING_S:
        message = f"{theirs} and this machine's agree within {SKEW_WARNING_S:.0f} s"
        return Finding(check=check, grade=Grade.OK, message=message)
    return Finding(
        check=check,
        grade=Grade.FAILED if size_s >= SKEW_FAILED_S else Grade.WARNING,
        message=f"{theirs} is {size_s:.1f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's",
        mend="run NTP on both machines (chronyc tracking, timedatectl); quota windows follow the database's clock",
    )


def check_store(blobs: BlobStore) -> Finding:
    """Check that blobs can be stored, by writing and removing a probe object."""
    try:
        blobs.check()
    except StoreError as error:
        return Finding(
            check="object store",
            grade=Grade.FAILED,
            message=str(error),
            mend="fix the store, its credentials (AWS_*) or LORAMUX_BLOB_URL; loaded adapters work without the store",
        )
    return Finding(check="object store", grade=Grade.OK, message="blobs can be stored")


def check_disk(
    directory: Path, free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
) -> Finding:
    """Check that there is free space for the database, the disk tier and uploads."""
    place = next(path for path in (directory, *directory.parents) if path.exists())
    free = free_bytes(place)
    message = f"{free / (1 << 30):.1f} GiB are free in {directory}"
    if free >= LITTLE_DISK_BYTES:
        return Finding(check="disk", grade=Grade.OK, message=message)
    return Finding(
        check="disk",
        grade=Grade.FAILED if free < TOO_LITTLE_DISK_BYTES else Grade.WARNING,
        message=message,
        mend="free space, lower LORAMUX_DISK_TIER_BYTES, or move LORAMUX_DISK_TIER_DIR to a larger disk",
    )


def check_data_directory(directory: Path) -> Finding:
    """Check that only the owner can access the data directory. Its files contain usage and key digests."""
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
    except OSError as error:
        return Finding(
            check="data directory",
            grade=Grade.WARNING,
            message=f"{directory}: {error.strerror}",
            mend="the server creates it on its first start; if it should already exist, set --data-dir",
        )
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return Finding(
            check="data directory",
            grade=Grade.FAILED,
            message=f"this user cannot write to {directory}",
            mend=f"run as its owner, or change the owner: chown -R USER {directory}",
        )
    if mode & 0o077:
        return Finding(
            check="data directory",
            grade=Grade.WARNING,
            message=f"other users of this machine can access {directory} (mode {mode:04o})",
            mend=f"chmod 700 {directory}",
        )
    return Finding(check="data directory", grade=Grade.OK, message=f"only its owner can access {directory}")


def check_quantized(directory: Path) -> Iterator[Finding]:
    """Report bases that were quantised here and predict much worse than their float models."""
    for path in sorted(path for name in QUALITY_FILES.values() for path in directory.glob(f"*/{name}")):
        try:
            quality = msgspec.json.decode(path.read_bytes(), type=Quality)
        except (OSError, msgspec.MsgspecError) as error:
            yield Finding(
                check="quantised base",
                grade=Grade.WARNING,
                message=f"{path} cannot be read: {error}",
                mend="delete the file: the next start measures the quality again",
            )
            continue
        yield Finding(
            check="quantised base",
            grade=Grade.WARNING if quality.is_poor else Grade.OK,
            message=quality.problem if quality.is_poor else f"{quality.format}: {quality.sentence}",
            mend=quality.advice if quality.is_poor else None,
        )


def check_sandbox(is_required: bool, find_missing: Callable[[], Collection[str]] = missing_measures) -> Finding:
    """Report which sandbox mechanisms confine the process that reads tenants' uploads."""
    check = "sandbox"
    try:
        missing = find_missing()
    except ValidationFailed as error:
        return Finding(
            check=check,
            grade=Grade.FAILED,
            message=str(error),
            mend="run 'python -m loramux.adapter_store.sandbox.confinement' as the server's user and fix what it finds",
        )
    standing = ", ".join(name for name in MEASURES if name not in missing) or "only limits on memory and time"
    lacking = [name for name in MEASURES if name in missing]
    if not set(lacking) & set(ESSENTIAL):
        note = f"; there is no {NETWORK}, but {CALLS} denies the network too" if lacking else ""
        return Finding(check=check, grade=Grade.OK, message=f"uploads are validated in a sandbox with {standing}{note}")
    return Finding(
        check=check,
        grade=Grade.FAILED if is_required else Grade.WARNING,
        message=f"uploads are validated in a sandbox with {standing}; missing: {', '.join(lacking)}",
        mend="; ".join(f"{name}: {SANDBOX_FIXES[name]}" for name in lacking)
        + ("" if is_required else ". With LORAMUX_SANDBOX=required, a server does not start without them"),
    )


def check_engine_socket(run: Path) -> Finding:
    """Check the engine's socket directory: `run` in the data directory, or a temporary one if that path is too long."""
    check = "socket directory"
    if len(os.fsencode(run.absolute() / SOCKET_NAME)) > MAX_SOCKET_PATH:
        return check_socket_directory(Path(tempfile.gettempdir()))
    for path in (run, run / SOCKET_NAME, *run.glob("engine-*"), *run.glob(f"engine-*/{SOCKET_NAME}")):
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError:
            # No server is running, or none has run yet.
            continue
        if mode & 0o077:
            return Finding(
                check=check,
                grade=Grade.WARNING,
                message=f"other users of this machine can access {path} (mode {mode:04o})",
                mend=f"chmod go= {path}",
            )
    return Finding(check=check, grade=Grade.OK, message=f"only its owner can access the engine's socket in {run}")


def check_socket_directory(directory: Path) -> Finding:
    """Check that a directory is suitable for the engine's socket: writable, short, and safe from other users."""
    check = "socket directory"
    if len(os.fsencode(directory)) + len(SOCKET_PART) > MAX_SOCKET_PATH:
        return Finding(
            check=check,
            grade=Grade.FAILED,
            message=f"the path {directory} is too long: a Unix socket's path has at most {MAX_SOCKET_PATH} bytes",
            mend="set TMPDIR to a shorter path, such as /tmp",
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        return Finding(
            check=check,
            grade=Grade.FAILED,
            message=f"this user cannot write to {directory}",
            mend="set TMPDIR to a directory of your own",
        )
    mode = directory.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        return Finding(
            check=check,
            grade=Grade.WARNING,
            message=f"other users can rename files in {directory}, which has no sticky bit",
            mend=f"chmod +t {directory}, or set TMPDIR to a directory of your own",
        )
    return Finding(check=check, grade=Grade.OK, message=f"{directory} can hold the engine's socket")
