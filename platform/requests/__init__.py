"""The life of a request, and everything that all surfaces of the API share."""
