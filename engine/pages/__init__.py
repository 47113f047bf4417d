"""The page pool: who owns each page, what is evicted, the prefix cache."""
