"""python run_blocks.py FILE ...: runs each file as the main program of a namespace of its own, one after the other in
one process, and says fine. Under torchrun this saves a start of all ranks for each file."""

import runpy
import sys

for file in sys.argv[1:]:
    print("running", file, flush=True)
    runpy.run_path(file, run_name="__main__")
print("fine")
