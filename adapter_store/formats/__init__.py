"""File formats of adapters: safetensors, the canonical file and packed pages."""
