"""Request fields that forbid tokens, combined with the grammar's mask."""
