"""The pages, one file for each kind of thing."""
