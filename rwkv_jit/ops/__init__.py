"""The ops: one module each, over a shared boundary and backend."""
