"""The fixtures that aiormq keeps in a conftest.py above its tests, which its source package lacks."""

import pytest
from tests.docker_client import DockerClient
from yarl import URL


@pytest.fixture(scope="session")
def rabbitmq_container():
    return DockerClient().run("", ["5672/tcp", "5671/tcp"])


@pytest.fixture(scope="session")
def amqp_direct_url(rabbitmq_container):
    return URL.build(scheme="amqp", user="guest", password="guest", host="127.0.0.1", port=rabbitmq_container.ports["5672/tcp"], path="//")
