"""Running a step: executors, step buffers, sampling."""
