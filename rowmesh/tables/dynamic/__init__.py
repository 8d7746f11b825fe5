"""Dynamic tables: any 64-bit id, bounded memory, the same decisions for any number of ranks."""
