"""Reserve and settle quota for many requests in one transaction."""
