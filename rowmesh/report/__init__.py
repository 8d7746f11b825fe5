"""Reports for people: pages, charts, tables and explanations of plans and data."""
