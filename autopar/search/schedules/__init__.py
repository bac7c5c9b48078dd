"""Where to cut a chain of segments into chunks, under which schedules to price them, and schedules solved for them."""
