"""What can go wrong when an engine starts; each message says how to mend it."""

from __future__ import annotations


class EngineError(Exception):
    """The root of this package's errors."""


class ModelNotSupported(EngineError):
    """The model directory is missing, malformed, or asks for something that loramux does not do."""


class ConfigNotUsable(EngineError):
    """Settings that contradict each other or lie outside their range."""


class PoolTooSmall(EngineError):
    """The page pool cannot hold what the configuration asks of it."""


class DeviceNotUsable(EngineError):
    """The device that was asked for is not there, or this installation cannot use it."""
