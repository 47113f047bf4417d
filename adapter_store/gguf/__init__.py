"""Reads llama.cpp LoRA adapters and converts them to PEFT files."""
