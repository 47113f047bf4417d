"""SQL for adapters and versions, and model name resolution."""
