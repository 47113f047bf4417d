"""The public listener: routes, request and answer shapes, errors, and the OpenAPI document."""
