"""A real base model, adapters that do work for a company, and what they answer to held-out prompts."""
