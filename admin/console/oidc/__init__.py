"""The OpenID provider: discovery, tokens, sign-ins under way, and roles that it confirms again."""
