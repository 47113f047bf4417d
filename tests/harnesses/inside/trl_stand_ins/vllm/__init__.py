"""Stands for vLLM, which TRL wants to be installed. Nothing in it is called when TRL publishes only adapters."""
