"""What the commands of the command line share: arguments, output, plans."""
