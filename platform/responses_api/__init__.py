"""OpenAI's Responses API: input items become a conversation, and an answer becomes output items and events."""
