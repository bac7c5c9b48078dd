"""Other processes of this machine, forked from a clean template: a fork of this one would copy torch's threads."""
