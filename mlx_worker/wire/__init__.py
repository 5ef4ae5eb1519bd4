"""Bytes and JSON ↔ records. No sockets, no clock, no model."""
