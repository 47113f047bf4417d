"""Merges several plain LoRA adapters into one, as PEFT's `add_weighted_adapter` does."""
