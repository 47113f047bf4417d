"""What restricts the next token of a sequence: grammars, forbidden tokens, penalties and biases."""
