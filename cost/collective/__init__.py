"""Prices of collectives and of messages on described links, in seconds."""
