"""The page pool: page ownership, eviction and the prefix cache."""
