"""Embeddings, classes and scores: answers that are made from the pooled states of prompts."""
