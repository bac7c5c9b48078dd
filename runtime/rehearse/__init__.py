"""Runs a program without numbers or other ranks, to measure its memory."""
