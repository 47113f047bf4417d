"""Commands that call an OpenAI API over the network with a tenant's key."""
