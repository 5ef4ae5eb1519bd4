"""The local HTTP API: who may call it, what it answers beside chats, and what it counts."""
