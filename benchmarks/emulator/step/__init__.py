"""The price of a step of a layout, from those of its sections: pipeline, optimizer, memory."""
