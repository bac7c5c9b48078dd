"""Seconds of collectives and of messages on described links."""
