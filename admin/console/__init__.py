"""The web console on the admin listener: server-rendered pages over the routes of `/admin/v1`."""
