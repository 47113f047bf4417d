"""Adapters in the format of mlx-lm."""
