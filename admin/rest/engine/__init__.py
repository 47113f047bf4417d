"""Routes for the server, its engine, and the requests in flight."""
