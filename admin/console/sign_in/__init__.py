"""Signing in and out: the login form, and the way to an OpenID provider and back."""
