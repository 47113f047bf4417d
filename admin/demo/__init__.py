"""The demo base model, its adapters, and the script that trained them."""
