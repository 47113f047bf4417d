"""Signing in and out: the login form, and the redirects to an OpenID provider and back."""
