"""Routes about adapters, their versions, uploads and aliases."""
