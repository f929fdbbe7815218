"""The router: ``create_app`` is the whole stack, from the outside in."""

from __future__ import annotations

import flask

from omniqueue import catalog, celery_app, settings
from web import decode, files, health, images, jobs, models, openai_format
from web.services import Services, attach


def create_app(config: settings.Settings | None = None, known: catalog.Catalog | None = None) -> flask.Flask:
    """The WSGI application. Raises ConfigError when the environment or a stage config is not valid."""
    config = config or settings.load()
    celery_app.publish_only(config)
    app = flask.Flask("omniqueue.web", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = decode.READ_BYTES
    attach(app, Services.build(config, known or catalog.load(config)))
    for family in (images, jobs, models, files, health):
        app.register_blueprint(family.blueprint)
    openai_format.register(app)
    return app
