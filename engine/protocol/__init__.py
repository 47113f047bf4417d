"""Messages between a gateway and an engine, and the errors that an engine reports at its start."""
