"""The OpenID provider: discovery, tokens, sign-ins in progress, and the confirmation of roles."""
