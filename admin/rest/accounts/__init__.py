"""Routes for tenants, keys and the audit log."""
