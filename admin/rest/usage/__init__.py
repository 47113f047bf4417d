"""Routes for usage, costs, prices and quotas."""
