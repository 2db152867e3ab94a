"""One run of a model: a step of several requests, and the block tables of a cache."""
