"""The choice of the replica that runs a request. It is pure Python and does no I/O."""
