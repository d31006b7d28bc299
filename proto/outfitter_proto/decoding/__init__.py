"""The codec's checks beyond types: bounds, the place of a fault, unknown fields."""
