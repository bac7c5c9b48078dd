"""Plans: the object that users meet, its JSON and text forms, and its checks."""
