"""The shared language: graphs, placements, programs, and what a plan records. It imports no pass, price or runtime."""
