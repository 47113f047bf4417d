"""Products of a base's weights: floats, codes and experts."""
