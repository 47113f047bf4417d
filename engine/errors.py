"""Errors raised at engine startup. Each message explains how to fix the problem."""

from __future__ import annotations


class EngineError(Exception):
    """Base class of this package's errors."""


class ModelNotSupported(EngineError):
    """The model directory is missing or malformed, or needs a feature that loramux does not support."""


class ConfigNotUsable(EngineError):
    """Settings are out of range, contradict each other, or cannot be used with this machine's files and memory."""


class PoolTooSmall(EngineError):
    """The page pool is too small for the configuration."""


class DeviceNotUsable(EngineError):
    """The requested device is missing, or this installation cannot use it."""
