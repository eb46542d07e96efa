"""java.net.http, which requests HTTP/2 with every request to a plain address (`Upgrade: h2c`)."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.fakes import FakeProvider
from tests.fakes.provider import tokens
from tests.support.accounts import App
from tests.support.programs import require

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK = """
import java.net.URI;
import java.net.http.*;

class Ask {
    public static void main(String[] given) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (String body : new String[] {given[2], given[3]}) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(given[0]))
                .header("Authorization", "Bearer " + given[1]).header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(body)).build();
            HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.version() + " " + answer.body().replace("\\n", " "));
        }
    }
}
"""


async def test_the_java_client_is_answered(app: App, provider: FakeProvider, tmp_path: Path) -> None:
    (tmp_path / "Ask.java").write_text(ASK)
    prompts = [provider.plays(tokens("one", "two")) for _ in range(2)]
    bodies = [
        json.dumps({"prompt": prompt, "stream": stream}) for prompt, stream in zip(prompts, (False, True), strict=True)
    ]
    command = [require("java"), str(tmp_path / "Ask.java"), f"{app.gateway.address}{app.path}", app.token(), *bodies]
    java = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await asyncio.wait_for(java.communicate(), 60)
    whole, stream = said.decode().splitlines()
    assert whole.startswith("200 HTTP_1_1 {")
    assert '"text":"onetwo"' in whole
    assert stream.startswith('200 HTTP_1_1 data: {"token":"one"}')
    assert "event: done" in stream
