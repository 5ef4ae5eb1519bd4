"""Serve the same requests with and without a draft, and report what that changed."""
