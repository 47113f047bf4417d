"""The engine's loop, its configuration, and its assembly."""
