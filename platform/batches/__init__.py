"""`/v1/files` and `/v1/batches`: files of requests that run when the engine has room."""
