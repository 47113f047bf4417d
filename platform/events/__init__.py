"""Events of tenants: their numbers, their streams, and their delivery to webhooks."""
