"""Values and rules without input or output."""
