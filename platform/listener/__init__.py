"""The public listener: the routes of all surfaces, its OpenAPI document, and the health checks."""
