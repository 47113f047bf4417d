"""The blob store: one interface over a local directory and S3."""
