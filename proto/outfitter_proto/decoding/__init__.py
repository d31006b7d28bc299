"""What the codec checks beyond types: bounds, exact faults, fields of later versions."""
