"""The routes below `/admin/v1`, one file per resource."""
