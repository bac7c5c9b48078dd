"""Loops that exist: Hugging Face's Trainer and Accelerate, and Lightning.

Each module needs its library (``autopar[hf]``, ``autopar[lightning]``), and is imported by itself.
"""
