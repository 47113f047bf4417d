"""Reserve and settle quota, many requests in one transaction."""
