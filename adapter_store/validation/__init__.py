"""Whether uploaded files are an adapter of the base, decided in a sandboxed process."""
