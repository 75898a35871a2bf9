"""A worker's model split among several processes: tensor parallelism."""
