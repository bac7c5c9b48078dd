"""What objects, code and files hold, as hashes, and the folder where work is kept under them."""
