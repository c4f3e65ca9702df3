"""Several processes that compute one model: rank 0 decides, the others follow."""
