"""Runs the sections of a program on one rank."""
