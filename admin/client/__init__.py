"""The client side of the admin REST: calls, profiles, push and pull."""
