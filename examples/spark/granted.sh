#!/bin/sh
# Spark's discovery script for a worker in `outfitter run --resource gpu=1`: what has been granted already.
echo "{\"name\": \"gpu\", \"addresses\": [\"$CUDA_VISIBLE_DEVICES\"]}"
