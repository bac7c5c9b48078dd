"""Descriptions of hardware: devices, links, presets, and cluster files."""
