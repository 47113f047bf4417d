"""Running a step: executors, step buffers and sampling."""
