"""OpenAI's chat and text completions, its list of models, and vLLM's tokenization: bodies and answers."""
