"""A small base model that thinks and calls tools, adapters for it, and the script that trains them."""
