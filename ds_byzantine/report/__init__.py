"""Room for what reads events.jsonl: tables, pictures, one static page. Never imports torch."""
