"""The command line, ``autopar plan | explain | diff | run | verify | doctor | calibrate | bench``."""
