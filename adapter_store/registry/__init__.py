"""The SQL of adapters and versions, and the resolution of model names."""
