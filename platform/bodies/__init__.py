"""Request bodies: how they are read and validated, and the fields that several surfaces share."""
