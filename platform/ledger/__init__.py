"""Usage events, rollups, reports and prices."""
