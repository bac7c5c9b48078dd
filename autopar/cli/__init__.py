"""The shared parts of the commands of the command line: arguments, output, plans."""
