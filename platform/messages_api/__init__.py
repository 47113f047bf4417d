"""Anthropic's Messages API: `/v1/messages`, `/v1/messages/count_tokens`, and its shape of `/v1/models`."""
