"""File formats of adapters and bases: safetensors, the canonical file, packed pages and quantised weights."""
