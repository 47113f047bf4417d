"""The blob store: one interface over a local directory, memory and S3."""
