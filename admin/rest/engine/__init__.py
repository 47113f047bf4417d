"""Routes about the server, its engine, and the requests that run."""
