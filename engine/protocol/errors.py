"""Errors raised at engine startup. Each message names the problem and, where possible, the fix."""

from __future__ import annotations


class EngineError(Exception):
    """Base class of this package's errors."""


class ModelNotSupported(EngineError):
    """The model directory is missing or malformed, the model needs a feature that loramux does not support, or a
    setting is outside the model's limits.
    """


class ConfigNotUsable(EngineError):
    """Settings are out of range, contradict each other, or cannot be used with this machine's files and memory."""


class PoolTooSmall(EngineError):
    """The page pool is too small for the configuration."""


class DeviceNotUsable(EngineError):
    """The requested device is missing, this installation cannot use it, or it lacks memory or instructions that the
    engine needs.
    """
