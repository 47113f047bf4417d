"""The serving process: settings, listeners, connections, transfer slots, logs and the data directory."""
