"""The routes under `/admin/v1`, one file per resource."""
