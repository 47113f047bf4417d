"""A conversation with a model of an OpenAI API."""
