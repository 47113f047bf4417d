"""The public listener: routes, request and response shapes, errors, and the OpenAPI document."""
