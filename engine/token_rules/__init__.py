"""Request fields that forbid tokens: the tokens that they allow next, beside the grammar."""
