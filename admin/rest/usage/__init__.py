"""Routes about usage, costs, prices and quotas."""
