"""Pipeline schedules as data: instructions, named schedules, their text, and the proof that they run."""
