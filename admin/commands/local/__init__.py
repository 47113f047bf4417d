"""Commands that work on this machine: starting servers, fetching base models, and checks."""
