"""The client side of the admin REST API: calls, profiles, push and pull."""
