"""Where to cut a chain of segments into chunks, and under which schedules to price them."""
