"""Groups, collectives, buckets and the pipeline: everything that speaks to other ranks."""
