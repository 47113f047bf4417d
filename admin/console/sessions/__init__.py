"""Sessions in the database, their cookies, content and rights, and the throttle for failed sign-ins."""
