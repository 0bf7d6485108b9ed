"""What `examples/serve.py` consists of: vocabularies, the scheduler, and OpenAI's API over HTTP."""
