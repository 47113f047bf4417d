"""The engine process and its links to gateways."""
