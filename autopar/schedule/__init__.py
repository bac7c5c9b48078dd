"""Pipeline schedules as data: actions, named schedules, their text form, and the proof that they run."""
