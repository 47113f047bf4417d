"""Drafts: tokens that probably come next, which a step verifies together with the next token."""
