"""Generated requests, right and wrong ones, held to the published OpenAPI document.

schemathesis makes them from `/openapi.json` alone: every answer must be one that the document
promises, what breaks the document must be refused, and afterwards the server is as it was. What the
document allows may be refused all the same: no schema knows the served length.
"""

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from dflash_jax.serving.openapi import openapi_document
from dflash_jax.serving.service import Service
from serving_http import Site, running
from tiny_served import start

pytestmark = [
    pytest.mark.oracle,
    # schemathesis' own strategies do.
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
]

EXAMPLES = 150
# What only reads has no wrong request but another path.
OPERATIONS = [
    (method, path, kind)
    for path, methods in openapi_document(0)["paths"].items()
    for method, kinds in (("get", ["positive"]), ("post", ["positive", "negative"]))
    for kind in kinds
    if method in methods
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    llm = start(tmp_path_factory.mktemp("schemathesis"))
    with Service(llm) as service, running(service) as site:
        yield site
    assert llm.compiles_in_service == 0
    load = llm.load()
    assert (load.waiting, load.prefilling, load.decoding) == (0, 0, 0)
    assert load.free_slots == load.slots


@pytest.mark.parametrize("method, path, kind", OPERATIONS)
def test_every_answer_is_one_that_the_document_promises(
    method: str, path: str, kind: str, site: Site
):
    import schemathesis
    from schemathesis.checks import positive_data_acceptance

    document = schemathesis.openapi.from_dict(site.get("/openapi.json").document)
    mode = schemathesis.GenerationMode(kind)
    seen: set[int] = set()

    @hypothesis.given(document[path][method].as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.filter_too_much,
        ],
    )
    def holds(case: Any) -> None:
        response = case.call(base_url=f"http://127.0.0.1:{site.port}", timeout=60)
        seen.add(response.status_code)
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    holds()
    if method == "post":
        assert seen & {200, 400} and (200 in seen or kind == "negative")
