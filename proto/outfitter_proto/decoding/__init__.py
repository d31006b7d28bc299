"""The codec's checks beyond types: bounds, the field of a fault, unknown fields."""
