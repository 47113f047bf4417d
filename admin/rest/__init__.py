"""The routes below `/admin/v1`, one file for each kind of thing."""
