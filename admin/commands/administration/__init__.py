"""Commands that call the administration API over the network with an administrator's key."""
