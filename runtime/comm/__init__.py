"""Process groups, collectives, and small exchanges between ranks."""
