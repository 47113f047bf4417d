"""The page pool: page ownership, eviction, the prefix cache."""
