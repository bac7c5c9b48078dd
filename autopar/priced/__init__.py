"""Plans priced for people who compare: that of a layout chosen by hand, and a table of plans for so many devices."""
