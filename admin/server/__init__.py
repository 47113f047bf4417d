"""The serving process: settings, listeners, connections, slots, logs and the data directory."""
