"""The parts of the front door to an engine in this process."""
