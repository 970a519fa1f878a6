"""The keys of a job: their paths in the schema, the types of their values, and errors about them."""
