"""Which adapters and versions exist, and which version a name means: SQL."""
