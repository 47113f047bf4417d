"""The pages, one file per resource."""
