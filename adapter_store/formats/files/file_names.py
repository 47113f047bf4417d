"""The names of an adapter's files.

PEFT writes the two required files. transformers writes two of the optional files and the tokenizer's files, and only
loramux uses the other three.
"""

from __future__ import annotations

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
UPLOAD_FILES = (CONFIG_FILE, TENSORS_FILE)
"""The names of an upload's two required files."""
MLX_FILE = "adapters.safetensors"
"""The tensors file of mlx-lm, which `formats/mlx` converts."""
TEMPLATE_FILE = "chat_template.jinja"
EARLIER_TEMPLATE_FILE = "chat_template.json"
"""An object whose `chat_template` is the template. transformers before 4.50 wrote it beside processors."""
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SMALL_TOKENIZER_FILES = (TOKENIZER_CONFIG_FILE, EARLIER_TEMPLATE_FILE)
"""The tokenizer's files that are also read from a bucket or a hub."""
PARSERS_FILE = "parsers.json"
VOCABULARY_FILE = "added_vocabulary.json"
POOLING_FILE = "pooling.json"
MODULES_FILE = "modules.json"
"""The list of steps that sentence-transformers writes beside a model."""
FURTHER_FILES = (TEMPLATE_FILE, GENERATION_FILE, PARSERS_FILE, VOCABULARY_FILE, POOLING_FILE)
"""The names of an upload's optional files, in the order in which a version's digest covers them."""
