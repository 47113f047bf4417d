"""Evals: a version answers a file of prompts, and graders compare the answers with the expected ones."""
