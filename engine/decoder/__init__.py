"""The decoder: layers, weights and their placement on a device."""
