"""Conversations: chat templates, the parts of messages, their positions and regions."""
