"""Chat templates, which turn conversations into the text of prompts."""
