"""Multi-stage generative pipelines over queues: one Celery worker a stage, references only through the router."""

__version__ = "0.1.0"
