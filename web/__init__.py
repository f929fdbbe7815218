"""The HTTP router: Flask under gunicorn, a broker of references that loads no model and no tensor library."""
