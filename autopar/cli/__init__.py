"""The command line, ``autopar plan``, ``explain``, ``diff``, ``run``, ``verify`` ... A new command goes here."""
