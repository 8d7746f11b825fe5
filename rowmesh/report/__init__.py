"""What people read: pages, charts, tables and explanations of plans and data."""
