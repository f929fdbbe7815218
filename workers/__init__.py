"""What a GPU process runs: one stage of a pipeline as a Celery worker."""
