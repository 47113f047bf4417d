"""The packed form of an adapter, and what becomes of each of its tensors."""
