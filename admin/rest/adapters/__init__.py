"""Routes for adapters, their versions, uploads and aliases."""
