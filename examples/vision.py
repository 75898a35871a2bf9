"""Makes a tiny vision model that talks nonsense, serves it on three workers, asks about two images. Usage: vision.py"""

import base64
import io
import pathlib
import subprocess
import sys
import tempfile

from openai import OpenAI
from PIL import Image

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))
from tiny_vl import make_tiny_vl


def image(colour: str) -> dict:
    file = io.BytesIO()
    Image.new("RGB", (160, 120), colour).save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}}


def ask(url: str) -> None:
    client = OpenAI(base_url=url + "/v1", api_key="none")
    asked = {"role": "user", "content": [{"type": "text", "text": "Which is red?"}, image("red"), image("blue")]}
    for _ in range(2):  # the second time nothing is encoded
        answer = client.with_raw_response.chat.completions.create(model="tiny", messages=[asked], max_tokens=24, temperature=0)
        print(repr(answer.parse().choices[0].message.content), "encoded by", answer.headers["x-kvrelay-encode"])


with tempfile.TemporaryDirectory() as folder:
    make_tiny_vl(pathlib.Path(folder))
    command = [sys.executable, "-m", "kvrelay", "serve", folder, "--encode=1", "--prefill=1", "--decode=1", "--port=0"]
    with subprocess.Popen([*command, "--served-model-name=tiny"], stdout=subprocess.PIPE, text=True) as server:
        try:
            ask(next(line.split()[3] for line in server.stdout if line.startswith("kvrelay ready on ")))
        finally:
            server.terminate()
