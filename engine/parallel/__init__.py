"""Several processes that share one model's linear layers."""
