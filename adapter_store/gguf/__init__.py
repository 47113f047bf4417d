"""Reads the LoRA adapters of llama.cpp and converts them to PEFT's files."""
