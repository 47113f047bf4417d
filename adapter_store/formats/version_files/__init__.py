"""Files beside an adapter's weights: tokenizers, templates, generation settings."""
