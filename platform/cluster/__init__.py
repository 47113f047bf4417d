"""Engines that Ray Serve places, restarts and scales, and the gateways that use them."""
