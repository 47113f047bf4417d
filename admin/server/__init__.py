"""The serving process: settings, listeners, connections, logs, upkeep."""
