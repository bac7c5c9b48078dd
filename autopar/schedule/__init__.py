"""Pipeline schedules as data: actions, named schedules, their text, and the proof that they run."""
