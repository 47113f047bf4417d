"""Routes about tenants, keys and the audit log."""
