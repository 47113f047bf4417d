"""Running requests, from submission to the engine to settlement."""
